"""Every public name of `oxrl.functional`, for programs outside this repository.

The core imports each function from its own file, and so reads only what a run needs.
"""

# ruff: noqa: F401, F403 - what is imported here is what programs outside this repository rely on

from oxrl.functional.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    gae,
    length_adaptive_lambda,
    optimal_token_baseline,
    teacher_gap,
    whiten,
)
from oxrl.functional.corrections import (
    CORRECTIONS,
    drop_drifted_failures,
    mask_weights,
    reject_k3,
    reject_weights,
    second_moment_mask,
    truncate_weights,
    veto_weights,
)
from oxrl.functional.gates import (
    gspo,
    importance_sampling,
    policy_gradient,
    ppo_clip,
)
from oxrl.functional.group_advantages import (
    group_center,
    group_center_batch_std,
    group_center_centered_std,
    group_center_rescaled,
    group_normalize,
    leave_one_out,
    length_weighted_center,
)
from oxrl.functional.kl import KLS, add_kl_to_rewards, kl_k1, kl_k2, kl_k3, kl_k3_plus, kl_k3_ratio
from oxrl.functional.logprobs import logprobs_from_logits
from oxrl.functional.masks import masked_mean, masked_sum, require_same_shape, weighted_sum
from oxrl.functional.policy_losses import (
    GATES,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_topk_kl,
    dppo_topk_tv,
    dppo_tv,
    dro,
    drpo,
    fipo,
    gmpo,
    kl_cov,
    proximal,
    rgpo_like,
    rspo,
    sapo,
    simko,
    vespo,
)
from oxrl.functional.preference_losses import *  # every preference loss
from oxrl.functional.ratios import RATIOS
from oxrl.functional.robust_advantages import iqr_normalize
from oxrl.functional.shaping import adapt_kl_coeff, informative_groups, overlong_penalty, pass_at_k
from oxrl.functional.success_advantages import (
    mean_normalize,
    pass_at_k_advantage,
    top_gap,
)
from oxrl.functional.supervised_losses import dft_loss, supervised_loss
from oxrl.functional.value_losses import value_loss
from oxrl.functional.weights import (
    WEIGHTS,
    fixed_length,
    lambda_group,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
)
