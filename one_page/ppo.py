"""PPO with a critic on one page: a language model learns to add from nothing but right and wrong.

It needs a model that answers at all, sometimes rightly. This makes one in ten seconds; any model in
Hugging Face format with a chat template will do. Then the page runs as it is, from the root of the
repository:

    oxrl train one_page/sft.yaml run.name=start model.name=builtin:tiny
    python one_page/ppo.py

`oxrl train one_page/ppo.yaml` computes the same: the same samples, losses, gradients and weights.
tests/repository/test_one_page.py proves it.
"""

import copy
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from oxrl.engines.sample.gumbel import gumbel_noise, noise_keys
from oxrl.functional import gae, logprobs_from_logits, ppo_clip, token_mean, value_loss, whiten

MODEL = "runs/start/checkpoints/step_00000150"
DATA = "one_page/sums.jsonl"
OUT = "runs/one_page_ppo"
SEED = 1
BATCHES = 200  # of samples; each is learned from in MINIBATCHES optimizer steps
MINIBATCHES = 2
PROMPTS = 32  # per batch
ANSWERS = 4  # per prompt
MAX_TOKENS = 3  # two digits and the end; an answer that goes on is cut, and wrong
TEMPERATURE = 1.0
LR = 5e-4
ADAM_EPS = 1e-5  # as PPO's code has it: a gradient that is rounding noise should not move a weight
MAX_NORM = 1.0
CLIP = 0.2
CRITIC_LR = 1e-3
VALUE_CLIP = 0.2
GAMMA = 1.0  # a reward is worth as much however many tokens come before it
LAMBDA = 0.95  # 0 trusts the critic's next value, 1 only the reward at the end

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
END = tokenizer.eos_token_id
# In eval mode, and never in train mode: with dropout a model would disagree with its own samples.
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
# The critic reads as the policy does, and says a number instead of the next token: at first 0, from
# where it can learn in either direction.
critic = copy.deepcopy(model.base_model)
value_head = torch.nn.Linear(model.config.hidden_size, 1)
torch.nn.init.zeros_(value_head.weight)
torch.nn.init.zeros_(value_head.bias)
critic_weights = [*critic.parameters(), *value_head.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=ADAM_EPS, weight_decay=0.0)
critic_optimizer = torch.optim.AdamW(critic_weights, lr=CRITIC_LR, eps=ADAM_EPS, weight_decay=0.0)
rows = [json.loads(line) for line in Path(DATA).read_text().splitlines()]


def stable_seed(*parts: int | str) -> int:
    """A number in [0, 2**63) that depends on what it is for, and on nothing that ran before.

    There is no generator whose state would have to be saved: whoever knows the seed of the run can
    draw any sample again, alone.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def row_at(draw: int) -> dict[str, str]:
    """The row at a position of the endless order in which rows are drawn."""
    epoch, position = divmod(draw, len(rows))
    keys = np.random.PCG64(stable_seed("order", SEED, epoch)).random_raw(len(rows))
    return rows[np.argsort(keys, kind="stable")[position]]


@torch.no_grad()
def sample(prompt: list[int], draw: int) -> list[list[int]]:
    """ANSWERS answers to a prompt, each as token ids with the token that ends it."""
    seeds = torch.tensor([stable_seed("sample", SEED, draw, i, 0, 0) for i in range(ANSWERS)])
    tokens = torch.tensor([prompt] * ANSWERS)
    for position in range(MAX_TOKENS):
        logits = model(tokens).logits[:, -1] / TEMPERATURE
        # The largest of logits plus Gumbel noise is a sample of their softmax. The noise is a
        # function of seed and position, so a sample does not depend on the batch it was drawn in.
        keys = noise_keys(seeds, torch.full_like(seeds, position))
        chosen = (logits + gumbel_noise(keys, logits.shape[1])).argmax(1, keepdim=True)
        tokens = torch.cat([tokens, chosen], dim=1)
    answers = tokens[:, len(prompt) :].tolist()
    # Rows that had ended went on, which costs time and changes nothing: cut them where they ended.
    return [ids[: ids.index(END) + 1] if END in ids else ids for ids in answers]


def logprobs_of(tokens: Tensor) -> Tensor:
    """The log-probability of each token given those before it, [B, T].

    Without an attention mask: padding is on the right, where attention to the left never sees it.
    """
    return logprobs_from_logits(model(tokens).logits, tokens, temperature=TEMPERATURE)


def values_of(tokens: Tensor) -> Tensor:
    """The reward that the critic expects before it sees each token, [B, T]."""
    said = value_head(critic(tokens).last_hidden_state).squeeze(-1)
    # What is said behind one token is the value of the next; the first one has none.
    return torch.nn.functional.pad(said[:, :-1], (1, 0))


steps: list[dict[str, float]] = []
samples: list[list[int]] = []
for batch in range(BATCHES):
    # Answers to the next prompts, and a reward for each.
    prompts = []
    answers = []
    rewards = []
    draws = []
    for draw in range(batch * PROMPTS, (batch + 1) * PROMPTS):
        row = row_at(draw)
        message = {"role": "user", "content": row["prompt"]}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        for answer in sample(prompt, draw):
            said = tokenizer.decode([t for t in answer if t not in (END, tokenizer.pad_token_id)])
            prompts.append(prompt)
            answers.append(answer)
            rewards.append(float(said.strip() == row["answer"]))
            draws.append(draw)

    # One rectangle of tokens. Only what the model wrote itself is trained on: prompts and padding
    # are not.
    pairs = list(zip(prompts, answers, strict=True))
    tokens = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt + answer) for prompt, answer in pairs],
        batch_first=True,
        padding_value=tokenizer.pad_token_id,
    )
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    token_rewards = torch.zeros(tokens.shape, dtype=torch.float64)
    for i, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        mask[i, len(prompt) : end] = True
        token_rewards[i, end - 1] = rewards[i]

    # What policy and critic say before the first step on this batch. The advantage of a token is by
    # how much things turned out better than the critic had expected before it.
    with torch.no_grad():
        old_logprobs = logprobs_of(tokens)
        old_values = values_of(tokens)
    advantages, returns = gae(token_rewards, old_values, mask, gamma=GAMMA, gae_lambda=LAMBDA)
    advantages = whiten(advantages, mask)

    # Several steps on one batch of samples. From the second on the policy is no longer the one that
    # sampled: the ratio makes up for that, and the clip stops tokens that have moved far enough.
    prompt_ids = torch.tensor(draws)
    shuffle = np.random.default_rng(stable_seed("minibatches", stable_seed(SEED, batch, 0)))
    order = shuffle.permutation(prompt_ids.unique().numpy())
    for part in np.array_split(order, MINIBATCHES):
        i = torch.isin(prompt_ids, torch.from_numpy(part)).nonzero()[:, 0]
        # Every trained token of the step counts the same, be its answer long or short. In a mean of
        # answers, a token of a long wrong one would be punished less than one of a short wrong one.
        weights = token_mean(mask[i])
        loss, _ = ppo_clip(
            logprobs_of(tokens[i]),
            old_logprobs[i],
            advantages[i],
            mask[i],
            weights,
            clip_low=CLIP,
            clip_high=CLIP,
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

        # The critic learns what came after each token, on the same rows and as carefully: its
        # values are clipped around the old ones.
        critic_loss, _ = value_loss(
            values_of(tokens[i]),
            old_values[i],
            returns[i],
            mask[i],
            weights,
            value_clip=VALUE_CLIP,
        )
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_norm = torch.nn.utils.clip_grad_norm_(critic_weights, MAX_NORM)
        critic_optimizer.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
        steps[-1] |= {"critic_loss": critic_loss.item(), "critic_norm": critic_norm.item()}
    samples += answers
    print(f"batch {batch + 1}  reward {sum(rewards) / len(rewards):.3f}  loss {loss.item():.4f}")

model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
