"""The same numbers on one page: what a model says of its samples in padded rows is to the last bit
what it said when it sampled them, token by token over a cache.

It needs a model that answers at all, sometimes rightly. This makes one, and runs the page:

    oxrl train one_page/sft.yaml run.name=start model.name=builtin:tiny
    python one_page/same_numbers.py

`oxrl train one_page/same_numbers.yaml` computes the same: the same samples, losses, gradients and
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
from oxrl.functional import group_normalize, token_mean, weighted_sum

MODEL = "runs/start/checkpoints/step_00000150"
DATA = "one_page/sums.jsonl"
OUT = "runs/one_page_same_numbers"
SEED = 0
BATCHES = 200  # of samples; each is learned from in one optimizer step
PROMPTS = 16  # per batch
GROUP = 16  # answers per prompt, which are compared with each other
MAX_TOKENS = 3  # two digits and the end; an answer that goes on is cut, and wrong
LR = 3e-4
ADAM_EPS = 1e-5  # as PPO's code has it: a gradient that is rounding noise should not move a weight
MAX_NORM = 1.0
ROWS, KEYS = 16, 32  # sums are made of so many rows and keys at a time

pad = torch.nn.functional.pad
pad_sequence = torch.nn.utils.rnn.pad_sequence
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
END = tokenizer.eos_token_id
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
config = model.config
weights = dict(model.named_parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=ADAM_EPS, weight_decay=0.0)
rows = [json.loads(line) for line in Path(DATA).read_text().splitlines()]


# A library adds up in an order that it chooses by the number of rows. With this function of oneDNN,
# and rows in multiples of ROWS, each row of x weight^T is what it is alone.
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        whole = pad(x, (0, 0, 0, -len(x) % ROWS))
        return torch.ops.mkldnn._linear_pointwise(whole, weight, None, "none", [], "")[: len(x)]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return slope @ weight, slope.t() @ x


def linear(x: Tensor, name: str) -> Tensor:
    return Product.apply(x.flatten(0, 1), weights[f"{name}.weight"]).unflatten(0, x.shape[:2])


def norm(x: Tensor, name: str) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
    return weights[f"{name}.weight"] * (x * scale)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair of numbers of [B, heads, T, d] by an angle that grows with the position."""
    part = torch.arange(0, x.shape[-1], 2).float() / x.shape[-1]
    angles = (positions[:, None] / config.rope_parameters["rope_theta"] ** part).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention [B, heads, T, d] to keys [B, heads, S, d], the last T of them the queries' own.

    ROWS queries at a time, and keys in multiples of KEYS: with a cache and without one the sums are
    the same. (Beyond 256 keys values would have to be added in pieces, too.)
    """
    count, span = query.shape[2], key.shape[2]
    query = pad(query * query.shape[3] ** -0.5, (0, 0, 0, -count % ROWS))
    key = pad(key, (0, 0, 0, -span % KEYS))
    value = pad(value, (0, 0, 0, -span % KEYS))
    later = torch.arange(key.shape[2]) > (span - count) + torch.arange(query.shape[2])[:, None]
    found = []
    for start in range(0, count, ROWS):
        scores = query[:, :, start : start + ROWS] @ key.transpose(2, 3)
        seen = scores.masked_fill(later[start : start + ROWS], -torch.inf)
        found.append(seen.softmax(-1) @ value)
    return torch.cat(found, dim=2)[:, :, :count]


def read(tokens: Tensor, cache: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Any]]:
    """Logits [B, T, V] of tokens behind those in the cache, and the cache with them in it."""
    positions = torch.arange(tokens.shape[1]) + (cache[0][0].shape[2] if cache else 0)
    x = weights["model.embed_tokens.weight"][tokens]
    kept = []
    for layer in range(config.num_hidden_layers):
        of = f"model.layers.{layer}"
        normed = norm(x, f"{of}.input_layernorm")
        wide = [linear(normed, f"{of}.self_attn.{name}_proj") for name in "qkv"]
        q, k, v = (each.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for each in wide)
        query = rotate(norm(q, f"{of}.self_attn.q_norm"), positions)
        key = rotate(norm(k, f"{of}.self_attn.k_norm"), positions)
        if cache:
            key = torch.cat([cache[layer][0], key], dim=2)
            v = torch.cat([cache[layer][1], v], dim=2)
        kept.append((key, v))
        attended = attend(query, key, v).transpose(1, 2).flatten(2)
        x = x + linear(attended, f"{of}.self_attn.o_proj")
        normed = norm(x, f"{of}.post_attention_layernorm")
        gate = linear(normed, f"{of}.mlp.gate_proj")
        gate = gate / (1 + torch.exp(-gate))  # PyTorch's silu has other last numbers of a tensor
        x = x + linear(gate * linear(normed, f"{of}.mlp.up_proj"), f"{of}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "model.embed_tokens"), kept


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """How likely tokens [...] are by their logits [..., V]."""
    return logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)


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


@torch.no_grad()
def sample(prompt: list[int], draw: int) -> list[tuple[Tensor, Tensor]]:
    """GROUP answers to a prompt, and how likely their tokens were."""
    seeds = torch.tensor([stable_seed("sample", SEED, draw, i, 0, 0) for i in range(GROUP)])
    tokens = torch.tensor([prompt] * GROUP)
    cache = []
    answers = torch.zeros(GROUP, MAX_TOKENS, dtype=torch.int64)
    likely = torch.zeros(GROUP, MAX_TOKENS)
    for place in range(MAX_TOKENS):
        logits, cache = read(tokens, cache)
        noise = gumbel_noise(noise_keys(seeds, torch.full_like(seeds, place)), logits.shape[2])
        answers[:, place] = (logits[:, -1] + noise).argmax(1)
        likely[:, place] = logprobs_of(logits[:, -1], answers[:, place])
        tokens = answers[:, place : place + 1]
    ends = [row.index(END) + 1 if END in row else MAX_TOKENS for row in answers.tolist()]
    return [(answers[i, :end], likely[i, :end]) for i, end in enumerate(ends)]


steps: list[dict[str, float]] = []
samples: list[list[int]] = []
different = 0
for batch in range(BATCHES):
    said, trained, likely, rewards, groups = [], [], [], [], []
    for draw in range(batch * PROMPTS, (batch + 1) * PROMPTS):
        prompt, right = prompt_at(draw)
        for answer, logprobs in sample(prompt, draw):
            text = tokenizer.decode([t for t in answer if t not in (END, tokenizer.pad_token_id)])
            said.append(torch.cat([torch.tensor(prompt), answer]))
            trained.append(pad(torch.ones_like(answer, dtype=torch.bool), (len(prompt), 0)))
            likely.append(pad(logprobs, (len(prompt), 0)))
            rewards.append(float(text.strip() == right))
            groups.append(draw)
            samples.append(answer.tolist())
    advantages = group_normalize(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    tokens, mask, sampled = (pad_sequence(each, True) for each in (said, trained, likely))

    # All rows at once, padded, without a cache: the same numbers, to the last bit.
    logits, _ = read(tokens, [])
    logprobs = logprobs_of(pad(logits[:, :-1], (0, 0, 1, 0)), tokens)
    different += int((logprobs != sampled)[mask].sum())

    ratio = (logprobs - logprobs.detach()).exp()
    loss = -weighted_sum(ratio * advantages[:, None], mask, token_mean(mask))
    optimizer.zero_grad()
    loss.backward()
    length = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    steps.append({"loss": loss.item(), "grad_norm": length.item()})
    print(f"batch {batch + 1}  reward {np.mean(rewards):.3f}  tokens that differ: {different}")

model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
