"""Sampling that goes on while a batch trains, on one page.

A sampler has slots, which are always full: a long answer keeps its own while others come and go,
and while the model is trained. So weights change in the middle of an answer, and tokens are older
than what learns from them. Their age has a bound, and each counts by how much likelier it is now.

It begins with the same model as sgrpo.py:

    oxrl train one_page/sft.yaml run.name=start model.name=builtin:tiny
    python one_page/continuous.py

`oxrl train one_page/continuous.yaml` computes the same: the same samples, with the same weights for
every token, losses, gradients and weights. tests/repository/test_one_page.py proves it.
"""

import hashlib
import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from oxrl.engines.sample.gumbel import gumbel_noise, noise_keys
from oxrl.functional import (
    group_normalize,
    importance_sampling,
    logprobs_from_logits,
    token_mean,
    truncate_weights,
)

MODEL = "runs/start/checkpoints/step_00000150"
DATA = "one_page/sums.jsonl"
OUT = "runs/one_page_continuous"
SEED = 0
BATCHES = 200  # of samples; each is learned from in one optimizer step
PROMPTS = 16  # per batch
GROUP = 8  # answers per prompt, which are compared with each other
MAX_TOKENS = 3  # two digits and the end; an answer that goes on is cut, and wrong
TEMPERATURE = 1.0
LR = 3e-4
ADAM_EPS = 1e-5  # as PPO's code has it: a gradient that is rounding noise should not move a weight
MAX_NORM = 1.0
SLOTS = 24  # answers sampled at the same time (of 32 and more, a run fills several at a time)
ROUNDS = 12  # that pass while a batch trains; in each of them every answer in a slot gets a token
FIRST = 2  # batches while which train nothing is sampled: a run may find ROUNDS by what they take
AHEAD = 2  # batches, here steps, that a token may be older than the weights that learn from it
MOST_RATIO = 2.0  # of how likely a token is now to how likely it was when it was sampled

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
END = tokenizer.eos_token_id
# In eval mode, and never in train mode: with dropout a model would disagree with its own samples.
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
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


Answer = dict[str, Any]
asked: list[Answer] = []  # every answer, GROUP in a row of each draw
waiting: deque[Answer] = deque()  # for a slot, in this order
running: list[Answer] = []  # in slots


def ask_for(draw: int) -> None:
    """Have the prompt of a draw answered, as soon as there are slots."""
    row = row_at(draw)
    message = {"role": "user", "content": row["prompt"]}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    for i in range(GROUP):
        seed = torch.tensor([stable_seed("sample", SEED, draw, i, 0, 0)])
        answer = {"draw": draw, "seed": seed, "prompt": prompt, "right": row["answer"]}
        answer |= {"tokens": [], "logprobs": [], "versions": [], "computed": None, "done": False}
        asked.append(answer)
        waiting.append(answer)


@torch.no_grad()
def go_on(answer: Answer, version: int) -> None:
    """One token more. The sampler of a run does this for all slots in one pass."""
    read = answer["prompt"] + answer["tokens"]
    # Keys and values of all tokens but the last are kept, unless answer or weights are new.
    if answer["computed"] is None:
        answer["computed"] = DynamicCache()
    else:
        read = read[-1:]
    said = model(torch.tensor([read]), past_key_values=answer["computed"]).logits[:, -1]
    logits = said / TEMPERATURE
    # The largest of logits plus Gumbel noise is a sample of their softmax. The noise is a function
    # of seed and position: a sample does not depend on what else is in the slots.
    keys = noise_keys(answer["seed"], torch.tensor([len(answer["tokens"])]))
    token = int((logits + gumbel_noise(keys, logits.shape[1])).argmax())
    answer["tokens"].append(token)
    answer["logprobs"].append(float(logits.log_softmax(1)[0, token]))
    answer["versions"].append(version)
    if token == END or len(answer["tokens"]) == MAX_TOKENS:
        answer |= {"done": True, "computed": None}


def decode_round(version: int) -> None:
    """Fill the slots, then one token more for every answer in a slot."""
    ended = False
    while waiting and len(running) < SLOTS:
        answer = waiting.popleft()
        go_on(answer, version)
        ended |= answer["done"]
        if not answer["done"]:
            running.append(answer)
    if not ended:  # or whoever waits is told of it first; the others go on in the next round
        for answer in running:
            go_on(answer, version)
        running[:] = [answer for answer in running if not answer["done"]]


def rectangle(values: list[list[Any]]) -> Tensor:
    """Rows of numbers, filled up with what padding has."""
    filler = tokenizer.pad_token_id
    each = [torch.tensor(numbers) for numbers in values]
    return torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=filler)


steps: list[dict[str, float]] = []
for batch in range(BATCHES):
    # Answers in slots go on with the weights of the last step. The tokens so far stay; keys and
    # values of them were computed with older weights, and are computed anew.
    for answer in running:
        answer["computed"] = None
    # The bound: what is asked for by now is learned from AHEAD batches from now, or before.
    for draw in range(len(asked) // GROUP, min(batch + AHEAD + 1, BATCHES) * PROMPTS):
        ask_for(draw)
    # Batches are learned from in the order of the data. Whoever took the first answers to end would
    # learn from short ones only.
    answers = asked[batch * PROMPTS * GROUP : (batch + 1) * PROMPTS * GROUP]
    while not all(answer["done"] for answer in answers):
        for _ in range(ROUNDS if batch >= FIRST else 1):
            decode_round(version=batch)
    # Samplers of their own go on while the batch trains, for exactly so many rounds, whatever a
    # clock says. Here these rounds come first, and by the same weights.
    for _ in range(ROUNDS if batch >= FIRST else 0):
        decode_round(version=batch)

    # One rectangle of tokens. Only what the model wrote itself is trained on: prompts and padding
    # are not.
    tokens = rectangle([answer["prompt"] + answer["tokens"] for answer in answers])
    sampled = rectangle([[0.0] * len(a["prompt"]) + a["logprobs"] for a in answers])
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    rewards = []
    for i, answer in enumerate(answers):
        start = len(answer["prompt"])
        mask[i, start : start + len(answer["tokens"])] = True
        ids = [token for token in answer["tokens"] if token not in (END, tokenizer.pad_token_id)]
        rewards.append(float(tokenizer.decode(ids).strip() == answer["right"]))

    # An answer is as good as it is better than the others to the same prompt, in their standard
    # deviations. Where all are right, or all are wrong, there is nothing to learn.
    groups = torch.tensor([answer["draw"] for answer in answers])
    better = group_normalize(torch.tensor(rewards, dtype=torch.float64), groups)
    advantages = better[:, None].expand(tokens.shape)

    # Older weights sampled more often what was likelier to them. So each token counts by how much
    # likelier it is now; a few of them should not count for all.
    logprobs = logprobs_from_logits(model(tokens).logits, tokens, temperature=TEMPERATURE)
    now = logprobs.detach()
    ratio = truncate_weights(now, sampled, mask, correction_max=MOST_RATIO)
    equal = token_mean(mask)
    loss, _ = importance_sampling(logprobs, now, advantages, mask, equal, correction=ratio)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    age = batch - min(min(answer["versions"]) for answer in answers)
    print(f"batch {batch + 1}  reward {sum(rewards) / len(rewards):.3f}  oldest token {age}")

model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
