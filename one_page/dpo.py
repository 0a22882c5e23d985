"""DPO on one page: a language model learns from pairs of a better and a worse answer.

It begins with any model in Hugging Face format that has a chat template. This makes a small one, in
ten seconds; then the page runs as it is, from the root of the repository:

    oxrl train one_page/sft.yaml run.name=start model.name=builtin:tiny
    python one_page/dpo.py

`oxrl train one_page/dpo.yaml` computes the same: the same losses, gradients and weights.
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

from oxrl.functional import dpo, logprobs_from_logits, masked_sum

MODEL = "runs/start/checkpoints/step_00000150"
DATA = "one_page/sums.jsonl"  # the worse answers are differences
OUT = "runs/one_page_dpo"
SEED = 0
STEPS = 60
PAIRS = 16  # per step
BETA = 0.1  # how dearly it is paid for to go away from the reference
LR = 2e-4
ADAM_EPS = 1e-5  # a gradient that is no more than rounding noise should not move a weight
MAX_NORM = 1.0

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
# In eval mode, which is without dropout: model and reference have to agree as long as they are one.
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
reference = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=ADAM_EPS, weight_decay=0.0)
rows = [json.loads(line) for line in Path(DATA).read_text().splitlines()]


def stable_seed(*parts: int | str) -> int:
    """A number in [0, 2**63) that depends on what it is for, and on nothing that ran before.

    There is no generator whose state would have to be saved: a run that is cut off goes on with the
    rows that would have come next.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def row_at(draw: int) -> dict[str, str]:
    """The row at a position of the endless order in which rows are drawn."""
    epoch, position = divmod(draw, len(rows))
    keys = np.random.PCG64(stable_seed("order", SEED, epoch)).random_raw(len(rows))
    return rows[np.argsort(keys, kind="stable")[position]]


def encode(prompt: str, reply: str) -> tuple[list[int], list[int]]:
    """Token ids of the question, and of the answer with the token that ends it.

    Apart from each other, as they are when the model answers: it never sees a token that reaches
    from the one into the other.
    """
    asked = [{"role": "user", "content": prompt}]
    answered = [*asked, {"role": "assistant", "content": reply}]
    before = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(answered, tokenize=False)
    prompt_ids = tokenizer.encode(before, add_special_tokens=False)
    reply_ids = tokenizer.encode(whole.removeprefix(before), add_special_tokens=False)
    # Some templates write a line feed behind the end, which no model is ever asked for.
    return prompt_ids, reply_ids[: reply_ids.index(tokenizer.eos_token_id) + 1]


def answer_logprobs(network: torch.nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """The log-probability of each whole answer, [B]: the sum of those of its tokens.

    Without an attention mask: padding is on the right, where attention to the left never sees it.
    """
    return masked_sum(logprobs_from_logits(network(tokens).logits, tokens), mask, dim=1)


steps: list[dict[str, float]] = []
for step in range(STEPS):
    # The better and the worse answer to a question stand side by side.
    pairs = []
    for draw in range(step * PAIRS, (step + 1) * PAIRS):
        row = row_at(draw)
        pairs.append(encode(row["prompt"], row["chosen"]))
        pairs.append(encode(row["prompt"], row["rejected"]))

    # One rectangle of tokens. An answer is judged: not what was asked, nor padding.
    tokens = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt + answer) for prompt, answer in pairs],
        batch_first=True,
        padding_value=tokenizer.pad_token_id,
    )
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(pairs):
        mask[i, len(prompt) : len(prompt) + len(answer)] = True

    # Not how likely the better answer is, but by how much more likely than the worse one it has
    # become since training began. Both may well become less likely than they were.
    logprobs = answer_logprobs(model, tokens, mask)
    with torch.no_grad():
        ref_logprobs = answer_logprobs(reference, tokens, mask)
    lengths = mask.sum(1)
    loss, metrics = dpo(
        logprobs[0::2],
        logprobs[1::2],
        ref_logprobs[0::2],
        ref_logprobs[1::2],
        lengths[0::2],
        lengths[1::2],
        torch.full((PAIRS,), 1 / PAIRS),
        beta=BETA,
    )

    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    accuracy = metrics["preference/accuracy"].item()
    print(f"step {step + 1}  loss {loss.item():.4f}  accuracy {accuracy:.2f}")

model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
