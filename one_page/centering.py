"""Cut sampling and score centering on one page: samples of the likelier tokens alone, and an update
that does not drift.

It needs a model that answers at all, sometimes rightly. This makes one, and runs the page:

    oxrl train one_page/sft.yaml run.name=start model.name=builtin:tiny
    python one_page/centering.py

`oxrl train one_page/centering.yaml` computes the same: the same samples, losses, gradients and
weights. tests/repository/test_one_page.py proves it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from oxrl.engines.sample.gumbel import gumbel_noise, noise_keys
from oxrl.functional import group_normalize, ppo_clip, token_mean

MODEL = "runs/start/checkpoints/step_00000150"
DATA = "one_page/sums.jsonl"
OUT = "runs/one_page_centering"
SEED = 0
BATCHES = 200  # of samples; each is learned from in MINIBATCHES optimizer steps
MINIBATCHES = 2
PROMPTS = 16  # per batch
GROUP = 16  # answers per prompt, which are compared with each other
MAX_TOKENS = 3  # two digits and the end; an answer that goes on is cut, and wrong
MIN_P = 0.02  # tokens less likely than this times the likeliest are not sampled
TOP_P = 0.95  # nor are those behind the ones that have as much together
HEAD = 4  # likeliest tokens that are told apart where the loss is centered
LR = 3e-4
ADAM_EPS = 1e-5  # as PPO's code has it: a gradient that is rounding noise should not move a weight
MAX_NORM = 1.0
BOUNDS = {"clip_low": 0.2, "clip_high": 0.2}
NOTHING = -1e30  # log-probability of what cannot be; -inf has no gradient

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
END = tokenizer.eos_token_id
# In eval mode, and never in train mode: with dropout a model would disagree with its own samples.
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=ADAM_EPS, weight_decay=0.0)
rows = [json.loads(line) for line in Path(DATA).read_text().splitlines()]


def stable_seed(*parts: int | str) -> int:
    """A number that depends on what it is for, and on nothing that ran before."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def prompt_at(draw: int) -> tuple[list[int], str]:
    """The prompt at a position of the endless order in which rows are drawn, and its answer."""
    epoch, position = divmod(draw, len(rows))
    keys = np.random.PCG64(stable_seed("order", SEED, epoch)).random_raw(len(rows))
    row = rows[np.argsort(keys, kind="stable")[position]]
    message = [{"role": "user", "content": row["prompt"]}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False), row["answer"]


def cut(logits: Tensor) -> Tensor:
    """Which tokens may be sampled, [n, V] bool: that cut distribution *is* the policy."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    chance = ranked.softmax(-1)
    inside = chance >= MIN_P * chance[:, :1]
    chance = ranked.masked_fill(~inside, -torch.inf).softmax(-1)
    inside &= chance.cumsum(-1) - chance < TOP_P
    inside[:, 0] = True
    return torch.zeros_like(inside).scatter(1, order, inside)


def outcomes(logits: Tensor, kept: Tensor, token: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a token [...], and of HEAD tokens and of all others, [..., HEAD + 1]."""
    z = logits.masked_fill(~kept, NOTHING)
    whole = z.logsumexp(-1, keepdim=True)
    others = z.scatter(-1, head, NOTHING).logsumexp(-1, keepdim=True)
    of_token = (z.gather(-1, token[..., None]) - whole)[..., 0]
    return of_token, torch.cat([z.gather(-1, head), others], dim=-1) - whole


def said_of(tokens: Tensor, kept: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """What the model says of tokens [B, T], and of HEAD tokens and all others in their places.

    The policy is the cut distribution: over the tokens that were kept, whatever weights say now.
    """
    logits = torch.nn.functional.pad(model(tokens).logits[:, :-1], (0, 0, 1, 0))
    return outcomes(logits, kept, tokens, head)


@torch.no_grad()
def sample(prompt: list[int], draw: int) -> list[Any]:
    """GROUP answers, and of each token what training needs: the tokens that were kept, the
    likeliest of them, and how likely the token, those and the others were.
    """
    seeds = torch.tensor([stable_seed("sample", SEED, draw, i, 0, 0) for i in range(GROUP)])
    tokens = torch.tensor([prompt] * GROUP)
    told = []
    for position in range(MAX_TOKENS):
        logits = model(tokens).logits[:, -1]
        kept = cut(logits)
        noise = gumbel_noise(noise_keys(seeds, torch.full_like(seeds, position)), logits.shape[1])
        chosen = (logits.masked_fill(~kept, -torch.inf) + noise).argmax(1)
        head = logits.masked_fill(~kept, -torch.inf).topk(HEAD).indices
        told.append((chosen, kept, head, *outcomes(logits, kept, chosen, head)))
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
    by_row = [torch.stack(values, dim=1) for values in zip(*told, strict=True)]
    ids = by_row[0].tolist()
    ends = [row.index(END) + 1 if END in row else MAX_TOKENS for row in ids]
    return [[values[i, :end] for values in by_row] for i, end in enumerate(ends)]


steps: list[dict[str, float]] = []
samples: list[list[int]] = []
for batch in range(BATCHES):
    pairs, rewards, groups = [], [], []
    for draw in range(batch * PROMPTS, (batch + 1) * PROMPTS):
        prompt, right = prompt_at(draw)
        for answer in sample(prompt, draw):
            said = tokenizer.decode(
                [t for t in answer[0] if t not in (END, tokenizer.pad_token_id)]
            )
            pairs.append((prompt, answer))
            rewards.append(float(said.strip() == right))
            groups.append(draw)
    advantages = group_normalize(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))

    # Rectangles: of tokens, and of what was told of them, which is at the token's place.
    longest = max(len(prompt) + len(answer[0]) for prompt, answer in pairs)
    shape = (len(pairs), longest)
    tokens = torch.full(shape, tokenizer.pad_token_id)
    mask = torch.zeros(shape, dtype=torch.bool)
    kept = torch.ones(*shape, model.config.vocab_size, dtype=torch.bool)
    head = torch.arange(HEAD).repeat(*shape, 1)
    sampled = torch.zeros(shape)
    sampler = torch.zeros(*shape, HEAD + 1)
    for i, (prompt, answer) in enumerate(pairs):
        own = slice(len(prompt), len(prompt) + len(answer[0]))
        tokens[i, : len(prompt)] = torch.tensor(prompt)
        mask[i, own] = True
        for values, told in zip((tokens, kept, head, sampled, sampler), answer, strict=True):
            values[i, own] = told

    # What the policy says before the first step on this batch.
    with torch.no_grad():
        old, old_outcomes = said_of(tokens, kept, head)

    group_ids = torch.tensor(groups)
    shuffle = np.random.default_rng(stable_seed("minibatches", stable_seed(SEED, batch, 0)))
    order = shuffle.permutation(group_ids.unique().numpy())
    for part in np.array_split(order, MINIBATCHES):
        i = torch.isin(group_ids, torch.from_numpy(part)).nonzero()[:, 0]
        logprobs, possible = said_of(tokens[i], kept[i], head[i])
        # Of the sampler HEAD tokens are known, and all others as one event. A sampled token that is
        # none of HEAD stands for that event.
        in_head = (head[i] == tokens[i][..., None]).any(-1)
        own = torch.where(in_head, logprobs, possible[..., -1])
        own_old = torch.where(in_head, old[i], old_outcomes[i][..., -1])
        better = advantages[i][:, None, None].expand(possible.shape)
        each = token_mean(mask[i])
        loss, _ = ppo_clip(own, own_old, better[..., 0], mask[i], each, **BOUNDS)
        # Minus what the loss is on average over what the sampler may have said instead, with the
        # same advantage: what all tokens of a place have in common moves nothing then. While the
        # policy is the sampler, in the first of the steps, it moves nothing anyway.
        chance = sampler[i].exp()
        counts = (mask[i][..., None] & (chance > 0)).flatten(1)
        share = (each[..., None] * chance).flatten(1)
        others = (possible.flatten(1), old_outcomes[i].flatten(1), better.flatten(1))
        expected, _ = ppo_clip(*others, counts, share, **BOUNDS)
        loss = loss - expected

        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    samples += [answer[0].tolist() for _, answer in pairs]
    print(f"batch {batch + 1}  reward {np.mean(rewards):.3f}  loss {loss.item():.4f}")

model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
