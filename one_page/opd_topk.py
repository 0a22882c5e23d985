"""Distillation on one page: a student learns from what a teacher says of the student's answers.

It needs two models with the same tokens, and no rewards. This makes a student that can hardly add,
and a teacher that can add better:

    oxrl train one_page/sft.yaml run.name=start model.name=builtin:tiny
    oxrl train one_page/sft.yaml run.name=teacher model.name=builtin:tiny run.steps=500
    python one_page/opd_topk.py

`oxrl train one_page/opd_topk.yaml` computes the same: the same samples, losses, gradients and
weights. tests/repository/test_one_page.py proves it.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from oxrl.engines.sample.gumbel import gumbel_noise, noise_keys
from oxrl.functional import token_mean, weighted_sum

MODEL = "runs/start/checkpoints/step_00000150"
TEACHER = "runs/teacher/checkpoints/step_00000500"
DATA = "one_page/sums.jsonl"
OUT = "runs/one_page_opd_topk"
SEED = 0
BATCHES = 200  # of samples; each is learned from in one optimizer step
PROMPTS = 32  # per batch, each answered once: answers are not compared with each other
MAX_TOKENS = 3  # two digits and the end; an answer that goes on is cut
CANDIDATES = 16  # most likely tokens of the teacher, at every place of an answer
LR = 1e-3
ADAM_EPS = 1e-5  # as PPO's code has it: a gradient that is rounding noise should not move a weight
MAX_NORM = 1.0

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
END = tokenizer.eos_token_id
# In eval mode, and never in train mode: with dropout a model would disagree with its own samples.
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
teacher = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=ADAM_EPS, weight_decay=0.0)
rows = [json.loads(line) for line in Path(DATA).read_text().splitlines()]


def stable_seed(*parts: int | str) -> int:
    """A number in [0, 2**63) that depends on what it is for, and on nothing that ran before.

    Whoever knows the seed of the run can draw any sample again, alone.
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
def sample(prompt: list[int], draw: int) -> list[int]:
    """The student's answer to a prompt, as token ids with the token that ends it."""
    seed = torch.tensor([stable_seed("sample", SEED, draw, 0, 0, 0)])
    answer: list[int] = []
    while len(answer) < MAX_TOKENS and END not in answer:
        logits = model(torch.tensor([prompt + answer])).logits[:, -1]
        # The largest of logits plus Gumbel noise is a sample of their softmax. The noise is a
        # function of seed and position, so a sample does not depend on what else is sampled.
        keys = noise_keys(seed, torch.tensor([len(answer)]))
        answer.append(int((logits + gumbel_noise(keys, logits.shape[1])).argmax()))
    return answer


def logprobs_of(network: torch.nn.Module, tokens: Tensor) -> Tensor:
    """The log-probability of every token at every place, given the tokens before it, [B, T, V].

    Without an attention mask: padding is on the right, where attention to the left never sees it.
    """
    said = network(tokens).logits[:, :-1].log_softmax(-1)
    return torch.nn.functional.pad(said, (0, 0, 1, 0))  # nothing is said of the first one


steps: list[dict[str, float]] = []
samples: list[list[int]] = []
for batch in range(BATCHES):
    # The student answers. It learns in places where it gets itself, not in those of a good answer.
    pairs = []
    right = 0
    for draw in range(batch * PROMPTS, (batch + 1) * PROMPTS):
        row = row_at(draw)
        message = {"role": "user", "content": row["prompt"]}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer = sample(prompt, draw)
        pairs.append((prompt, answer))
        said = tokenizer.decode([t for t in answer if t not in (END, tokenizer.pad_token_id)])
        right += said.strip() == row["answer"]  # to be printed; nothing learns from it

    # One rectangle of tokens. Only what the model wrote itself is trained on: prompts and padding
    # are not.
    tokens = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt + answer) for prompt, answer in pairs],
        batch_first=True,
        padding_value=tokenizer.pad_token_id,
    )
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(pairs):
        mask[i, len(prompt) : len(prompt) + len(answer)] = True

    # What the teacher finds likely there. That is all that is asked of it, beside what it makes of
    # the token that was sampled: a server tells no more.
    with torch.no_grad():
        by_teacher = logprobs_of(teacher, tokens)
    candidates = by_teacher.topk(CANDIDATES).indices

    # The divergence KL(student || teacher) of a place is the sum of S (log S - log T) over all
    # tokens. Its slope is the sum of (log S - log T) slope(S), as the slopes of all S add up to 0:
    # so the gap is held fixed. Of the candidates the sum is exact.
    by_student = logprobs_of(model, tokens)
    gap = (by_student - by_teacher).detach()
    of_candidates = (by_student.exp() * gap).gather(-1, candidates).sum(-1)

    # All other tokens are estimated from the one that was sampled. It stands for what is as likely
    # as it was itself: its part of the sum, over the probability by which it was sampled. That is
    # the student's own, so the ratio is 1, and has a slope. A sampled token that is a candidate has
    # been counted.
    place = tokens[..., None]
    own = by_student.gather(-1, place)[..., 0]
    ratio = (own - own.detach()).exp()
    counted = (candidates == place).any(-1)
    of_sampled = torch.where(counted, 0.0, ratio * gap.gather(-1, place)[..., 0])

    # The mean over what may be sampled is the divergence, and its gradient, whichever tokens are
    # candidates. Where student and teacher agree the gradient is 0 for each sample. Leaving the
    # other tokens out, as is often done, or scaling the candidates up to 1, is the gradient of
    # something else.
    loss = weighted_sum(of_candidates + of_sampled, mask, token_mean(mask))
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    samples += [answer for _, answer in pairs]
    print(f"batch {batch + 1}  right {right / PROMPTS:.3f}  divergence {loss.item():.4f}")

model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
