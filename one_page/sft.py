"""Supervised fine-tuning on one page: a language model imitates given answers.

It begins with any model in Hugging Face format that has a chat template. This makes a small one
that has seen little yet, in ten seconds; then the page runs as it is, from the root of the
repository, and halves the loss in as many:

    oxrl train one_page/sft.yaml run.name=start model.name=builtin:tiny
    python one_page/sft.py

`oxrl train one_page/sft.yaml` computes the same: the same losses, gradients and weights.
tests/repository/test_one_page.py proves it.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oxrl.functional import logprobs_from_logits, supervised_loss, token_mean

MODEL = "runs/start/checkpoints/step_00000150"
DATA = "one_page/sums.jsonl"
OUT = "runs/one_page_sft"
SEED = 0
STEPS = 150
ROWS = 16  # per step
LR = 2e-3
ADAM_EPS = 1e-5  # a gradient that is no more than rounding noise should not move a weight
MAX_NORM = 1.0

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
# In eval mode, which is without dropout, as it will be used.
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
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


def encode(row: dict[str, str]) -> tuple[list[int], list[int]]:
    """Token ids of the question, and of the answer with the token that ends it.

    Apart from each other, as they are when the model answers: it never sees a token that reaches
    from the one into the other.
    """
    asked = [{"role": "user", "content": row["prompt"]}]
    answered = [*asked, {"role": "assistant", "content": row["completion"]}]
    before = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(answered, tokenize=False)
    prompt = tokenizer.encode(before, add_special_tokens=False)
    answer = tokenizer.encode(whole.removeprefix(before), add_special_tokens=False)
    # Some templates write a line feed behind the end, which no model is ever asked for.
    return prompt, answer[: answer.index(tokenizer.eos_token_id) + 1]


steps: list[dict[str, float]] = []
for step in range(STEPS):
    pairs = [encode(row_at(draw)) for draw in range(step * ROWS, (step + 1) * ROWS)]

    # One rectangle of tokens. The model is to learn answers: not what it is asked, nor padding.
    tokens = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt + answer) for prompt, answer in pairs],
        batch_first=True,
        padding_value=tokenizer.pad_token_id,
    )
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(pairs):
        mask[i, len(prompt) : len(prompt) + len(answer)] = True

    # Without an attention mask: padding is on the right, where attention to the left never sees it.
    logprobs = logprobs_from_logits(model(tokens).logits, tokens)
    # The mean over all trained tokens of the step. A mean of means, of rows or of parts of a batch,
    # would count the tokens of short answers more than those of long ones.
    loss, _ = supervised_loss(logprobs, mask, token_mean(mask))

    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    print(f"step {step + 1}  loss {loss.item():.4f}")

model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
