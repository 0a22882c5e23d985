"""Models that read images: the same gradient however rows are cut, the sampler's numbers equal the
trainer's, whole runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import Module
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
)

from oxrl.assembly.images import model_images
from oxrl.commands.export import run_export
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.config.schema import Config
from oxrl.data.conversations import ConversationDataset
from oxrl.data.prompts import PromptDataset
from oxrl.data.rows import Record
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import ConfigError, DataError, InvariantError, RunDirectoryError
from oxrl.functional.logprobs import NO_CHANCE
from oxrl.modelfiles.folder import family_of
from oxrl.models.image_features import ImageReader
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.models.network import CausalNetwork, unpadded
from oxrl.models.vision_network import freeze, part_of
from oxrl.recipes.supervised import loss_fn, to_supervised_batch
from oxrl.rollouts.sync import make_requests
from oxrl.types import Sampling
from support.figures import Learned
from support.vision_families import FAMILIES, write_family, write_image
from support.vision_runs import batch_of, config, parts_of, rl, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")
# What tokenizers that come with a processor call its tokens.
SPECIAL_ROLES = {
    "idefics3": {},
    "llava": {"image_token": "<image>"},
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<boi>",
        "eoi_token": "<eoi>",
    },
}
WANT = frozenset({"logprobs"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    write_rows(found)
    return found


@pytest.fixture(scope="module", params=[*FAMILIES, pytest.param("smolvlm", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest, folder: Path) -> str:
    return str(write_family(request.param, folder / request.param))


@pytest.fixture(scope="module")
def policy(model: str) -> Module:
    """Of tests that change none of its weights."""
    return load_policy(model)


def gradient(policy: Module, batch: Any, parts: list[list[int]], budget: int) -> Tensor:
    policy.zero_grad()
    trainer = LocalTrainer(policy, TrainerOptions(lr=1e-3, micro_batch_tokens=budget))
    for part in parts:
        trainer.forward_backward(batch.select(torch.tensor(part)), loss_fn, WANT)
    flat = [value.flatten() for _, value in trainer.gradients()]
    return torch.cat(flat)


def test_the_gradient_does_not_depend_on_how_rows_are_cut(
    folder: Path, model: str, policy: Module
) -> None:
    batch = batch_of(config(folder, model))
    assert batch.inputs.extras["pixel_values"].row_offsets[1] == 0  # the first row has no image
    everything = [list(range(5))]
    whole = gradient(policy, batch, everything, 10**6)
    for parts, budget in (
        ([[row] for row in range(5)], 10**6),
        ([[4, 2], [0, 3], [1]], 10**6),
        (everything, 150),
        (everything, 1),
    ):
        found = gradient(policy, batch, parts, budget)
        assert float((found - whole).abs().max() / whole.abs().max()) < 1e-6


def test_packed_rows_have_the_gradient_of_rows_apart(
    folder: Path, model: str, policy: Module
) -> None:
    cfg = config(folder, model)
    data = ConversationDataset.load(
        cfg.data.train_files[0],
        load_tokenizer(cfg.model.name),
        parts_of(cfg).row_options(held_out=False),
    )
    examples = data.in_order()
    longest = max(len(example.token_ids) for example in examples)
    images = parts_of(cfg).images
    apart = to_supervised_batch(examples, 0, images=images)
    packed = to_supervised_batch(examples, 0, images=images, pack_tokens=2 * longest)
    rows = len(packed.inputs)
    assert rows < 5 and packed.inputs.position_ids is not None
    whole = gradient(policy, apart, [list(range(5))], 10**6)
    for parts, budget in (([list(range(rows))], 10**6), ([[row] for row in range(rows)], 1)):
        found = gradient(policy, packed, parts, budget)
        assert float((found - whole).abs().max() / whole.abs().max()) < 1e-6


def test_every_part_of_the_model_learns(folder: Path, model: str, policy: Module) -> None:
    batch = batch_of(config(folder, model))
    policy.zero_grad()
    trainer = LocalTrainer(policy, TrainerOptions(lr=1e-3))
    trainer.forward_backward(batch, loss_fn, WANT)
    parts = part_of(policy)
    moved = {parts[name] for name, value in trainer.gradients() if float(value.abs().max()) > 0}
    assert moved == {"vision", "projector", "language"}


def test_a_text_is_read_as_by_the_language_model_alone(policy: Any) -> None:
    body = policy.base_model
    language = getattr(body, "language_model", None) or body.text_model
    tokens = torch.tensor([[2, 70, 80, 90, 1, 3, 100, 110, 1]])
    with torch.no_grad():
        ours = CausalNetwork(policy).backbone(unpadded(tokens))
        alone = language(input_ids=tokens, use_cache=False).last_hidden_state
    assert torch.equal(ours, alone) or float((ours - alone).abs().max()) < 1e-6


def sampled(cfg: Config, policy: Module, samples: int = 3) -> Any:
    tokenizer = load_tokenizer(cfg.model.name)
    path = str(Path(cfg.data.train_files[0]).with_name("prompts.jsonl"))
    prompts = PromptDataset.load(path, tokenizer, parts_of(cfg).row_options(held_out=False))
    sampler = parts_of(cfg).local_sampler(policy)
    sampling = Sampling(max_tokens=8, stop_token_ids=(1,), temperature=1.0)
    draws = list(enumerate(prompts.in_order()))
    requests = make_requests(draws, samples=samples, sampling=sampling, run_seed=0)
    done = generate(sampler, requests, deadline_s=60)
    return sampler, requests, done


def test_samples_have_the_trainers_logprobs(folder: Path, model: str, policy: Module) -> None:
    from oxrl.data.batching import to_rollout_batch
    from oxrl.types import Rollout, Score

    cfg = config(folder, model)
    sampler, requests, done = sampled(cfg, policy)
    rollouts = [
        Rollout(
            prompt=request.prompt,
            completion=completion,
            score=Score(value=0.0),
            group_id=request.draw,
            sample=request.sample,
            seed=0,
        )
        for request, completion in zip(requests, done, strict=True)
    ]
    batch = to_rollout_batch(rollouts, pad_id=0, images=parts_of(cfg).images)
    trainer = LocalTrainer(policy, TrainerOptions(lr=1e-3, micro_batch_tokens=200))
    said: Any = trainer.forward(batch.inputs, WANT).logprobs
    mask = batch.inputs.response_mask
    assert float((said - batch.rollout_logprobs)[mask].abs().max()) < 1e-5
    # Every prompt is read once, whatever the number of samples.
    counted = sampler.metrics()
    prompts = {request.draw: len(request.prompt.token_ids) for request in requests}
    assert counted["rollout/prefill_tokens"] == sum(prompts.values())


def test_a_still_tower_reads_an_image_once(folder: Path, model: str) -> None:
    cfg = config(folder, model)
    policy: Any = load_policy(model)
    _, requests, expected = sampled(cfg, policy, samples=1)
    freeze(policy, "vision+projector")
    family = family_of(policy)
    assert family is not None
    tower = policy.base_model.get_submodule(family.tower[0].removesuffix("."))
    read: list[int] = []
    tower.register_forward_hook(lambda *_: read.append(1))
    sampler = parts_of(cfg).local_sampler(policy)
    first = 0
    for version in (1, 2):  # as after a step: what was computed before it is computed again
        done = generate(sampler, requests, deadline_s=60)
        for ours, theirs in zip(done, expected, strict=True):
            assert ours.token_ids == theirs.token_ids
            pairs = zip(ours.segments[0].logprobs, theirs.segments[0].logprobs, strict=True)
            assert max(abs(a - b) for a, b in pairs) < 1e-5
        assert len(read) == (first or len(read)) > 0
        first = len(read)
        sampler.update_weights([list(policy.named_parameters())], version)
    other = [(name, weight.detach().clone()) for name, weight in policy.named_parameters()]
    sampler.update_weights([other], 3)
    generate(sampler, requests, deadline_s=60)
    assert len(read) > first  # weights were copied: what was kept is not trusted


def test_equal_tokens_with_other_images_are_other_prompts(
    folder: Path, model: str, policy: Module
) -> None:
    names = [write_image(folder / f"same{n}.png", 32, 32, seed=10 + n) for n in range(2)]
    rows = [{"prompt": "what?", "answer": "", "images": [name]} for name in names]
    place = folder / "same"
    place.mkdir(exist_ok=True)
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in names:
        (place / name).write_bytes((folder / name).read_bytes())
    cfg = config(place, model, data={"train": str(place / "prompts.jsonl")})
    _, requests, done = sampled(cfg, policy, samples=1)
    assert requests[0].prompt.token_ids == requests[1].prompt.token_ids
    assert done[0].segments[0].logprobs[0] != done[1].segments[0].logprobs[0]


def test_tokens_of_images_have_no_probability(folder: Path, model: str) -> None:
    cfg = config(folder, model)
    policy: Any = load_policy(model)
    network = CausalNetwork(policy)
    never = network.head.never
    assert never is not None and never.any()
    banned = set(never.nonzero()[:, 0].tolist())
    # A policy that wants nothing else.
    with torch.no_grad():
        policy.get_output_embeddings().weight[never] *= 1e4
    _, _, done = sampled(cfg, policy)
    assert not banned & {token for completion in done for token in completion.token_ids}
    tokens = torch.tensor([[2, 70, 80, 90, 100, 110]])
    trainer = LocalTrainer(policy, TrainerOptions(lr=1e-3))
    said: Any = trainer.forward(unpadded(tokens), frozenset({"logprobs", "entropy"}))
    with torch.no_grad():
        hidden = network.backbone(unpadded(tokens))
        logits = hidden @ policy.get_output_embeddings().weight.T
    expected = logits.masked_fill(never, -torch.inf).log_softmax(-1)[:, :-1]
    picked = expected.gather(-1, tokens[:, 1:, None])[..., 0]
    assert torch.allclose(said.logprobs[:, 1:], picked, atol=1e-5)
    known = expected.masked_fill(never, 0.0)
    assert torch.allclose(said.entropy[:, 1:], -(known.exp() * known * ~never).sum(-1), atol=1e-5)
    assert NO_CHANCE < -1e20


@pytest.mark.parametrize("family", ["idefics3", "llava", "gemma3"])
def test_places_and_pixels_are_those_of_transformers_own_processor(
    folder: Path, family: str
) -> None:
    """Of the families whose processor is made without torchvision."""
    name = str(write_family(family, folder / f"own_{family}"))
    tokenizer: Any = load_tokenizer(name)
    reader = ImageReader(name, tokenizer)
    for role, token in SPECIAL_ROLES[family].items():
        setattr(tokenizer, role, token)
        setattr(tokenizer, f"{role}_id", tokenizer.convert_tokens_to_ids(token))
    if family == "idefics3":
        processor: Any = Idefics3Processor(reader.processor, tokenizer, image_seq_len=4)
    elif family == "llava":
        options: dict[str, Any] = {"patch_size": 8, "num_additional_image_tokens": 1}
        options["vision_feature_select_strategy"] = "default"
        processor = LlavaProcessor(reader.processor, tokenizer, **options)
    else:
        processor = Gemma3Processor(reader.processor, tokenizer, image_seq_length=4)
    if family != "gemma3":  # which wants names of tokens that a plain tokenizer does not keep
        # As a folder of the hub has it, found by its files.
        processor.save_pretrained(name)
        processor = AutoProcessor.from_pretrained(name)
        assert type(processor).__name__.endswith("Processor")
    images = [Image.open(folder / f"{number}.png").convert("RGB") for number in (1, 2)]
    text = f"see {reader.placeholder} or {reader.placeholder}?"
    theirs = processor(text=[text], images=[images], return_tensors="pt")
    ours = [reader.features(image) for image in images]
    before, between, after = text.split(reader.placeholder)
    written = before + ours[0].text + between + ours[1].text + after
    assert theirs["input_ids"][0].tolist() == tokenizer.encode(written, add_special_tokens=False)
    pixels = torch.cat([read.tensors["pixel_values"] for read in ours])
    found = theirs["pixel_values"].flatten(0, -4)[: len(pixels)]
    assert torch.equal(found, pixels)


def test_a_row_with_too_many_image_tokens_is_refused_by_name(folder: Path) -> None:
    cfg = config(folder, "builtin:tiny-vl")
    batch = batch_of(cfg)
    store = parts_of(cfg).images
    assert store is not None
    tokens = batch.inputs.tokens.clone()
    tokens[1, -1] = store.reader.image_id
    data = ConversationDataset.load(
        cfg.data.train_files[0],
        load_tokenizer(cfg.model.name),
        parts_of(cfg).row_options(held_out=False),
    )
    rows = [(f"row {n}", unit.images) for n, unit in enumerate(data.in_order())]
    import dataclasses

    mask = torch.ones_like(batch.inputs.attention_mask)
    broken = dataclasses.replace(batch.inputs, tokens=tokens, attention_mask=mask, extras={})
    with pytest.raises(InvariantError, match="'row 1' has 3 tokens of images, and its 1 images"):
        store.attach(broken, rows)


def test_a_supervised_run_leaves_a_whole_checkpoint(
    folder: Path, model: str, learned: Learned
) -> None:
    name = "sft_" + Path(model).name
    cfg = config(folder, model, name, data={"eval": str(folder / "rows.jsonl")})
    run(cfg)
    last = folder / name / "checkpoints" / "step_00000002"
    loaded = AutoModelForImageTextToText.from_pretrained(last, dtype=torch.float32)
    assert type(AutoImageProcessor.from_pretrained(last)).__name__.endswith("Pil")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    fell = lines[0]["update/loss"] - lines[-1]["eval/loss"]
    learned("fall of the loss", fell, at_least=0.0)
    kept = sorted(path.name for path in (folder / name / "images").iterdir())
    assert len(kept) == 5 and all(len(name) == 64 for name in kept)
    exported = run_export(folder / name, folder / f"exported_{name}")
    assert type(AutoImageProcessor.from_pretrained(exported)).__name__.endswith("Pil")
    again = load_policy(str(exported))
    for (name, ours), (_, theirs) in zip(
        again.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("freeze", ["vision", "projector", "vision+projector"])
def test_frozen_parts_stay_byte_for_byte(folder: Path, freeze: str) -> None:
    name = f"frozen_{freeze}"
    run(config(folder, "builtin:tiny-vl", name, model={"freeze": freeze}, run={"steps": 1}))
    checkpoints = folder / name / "checkpoints"
    before = load_policy(str(checkpoints / "step_00000000"))
    after = dict(load_policy(str(checkpoints / "step_00000001")).named_parameters())
    parts = part_of(before)
    changed = {parts[n] for n, p in before.named_parameters() if not torch.equal(p, after[n])}
    assert changed == {"vision", "projector", "language"} - set(freeze.split("+"))
    assert "model.freeze" in (folder / name / "run.log").read_text()


def test_the_tower_may_learn_at_a_rate_of_its_own(folder: Path, learned: Learned) -> None:
    moved: dict[str, dict[str, float]] = {}
    run(config(folder, "builtin:tiny-vl", "tower_none"))
    checkpoints = folder / "tower_none" / "checkpoints"
    before = load_policy(str(checkpoints / "step_00000000"))
    parts = part_of(before)
    for name, rate in (("same", 1e-3), ("slow", 1e-5), ("still", 0.0)):
        run(config(folder, "builtin:tiny-vl", f"tower_{name}", train={"tower_lr": rate}))
        last = folder / f"tower_{name}" / "checkpoints" / "step_00000002"
        after = dict(load_policy(str(last)).named_parameters())
        found = moved[name] = {"vision": 0.0, "projector": 0.0, "language": 0.0}
        for weight, old in before.named_parameters():
            change = float((old - after[weight]).abs().max())
            found[parts[weight]] = max(found[parts[weight]], change)
    assert moved["still"]["vision"] == 0.0
    share = moved["slow"]["vision"] / moved["same"]["vision"]
    learned("change at a hundredth of the rate", share, at_most=0.02)
    least = min(found["language"] for found in moved.values())
    learned("change of the language model", least, at_least=1e-3)
    ends = [
        folder / name / "checkpoints" / "step_00000002" / "model.safetensors"
        for name in ("tower_none", "tower_same")
    ]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def values(path: Path) -> list[dict[str, Any]]:
    timed = ("time/", "throughput/", "system/")
    lines = [json.loads(line) for line in path.open()]
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def test_a_run_that_goes_on_is_the_run_that_never_stopped(folder: Path) -> None:
    import shutil

    whole = rl(folder, "whole")
    run(whole)
    first = rl(folder, "first", run={"steps": 1})
    run(first)
    # As a run of two steps that was killed after one: the same but for how far it was to go.
    (folder / "first" / "result.json").unlink()
    then = rl(folder, "first")
    run(then, resume=True, accept=["run.steps"])
    assert values(folder / "whole" / "metrics.jsonl") == values(folder / "first" / "metrics.jsonl")
    for file in ("model.safetensors", "optimizer_exp_avg-00000.safetensors"):
        ends = [
            folder / name / "checkpoints" / "step_00000002" / file for name in ("whole", "first")
        ]
        assert ends[0].read_bytes() == ends[1].read_bytes()
    lines = [json.loads(line) for line in (folder / "whole" / "samples.jsonl").open()]
    shown = [line for line in lines if line.get("images")]
    assert shown and isinstance(shown[0]["prompt"], list)
    kept = {path.name for path in (folder / "whole" / "images").iterdir()}
    assert {name for line in shown for name in line["images"]} == kept
    shutil.rmtree(folder / "first")


def test_a_changed_image_is_seen_when_a_run_goes_on(tmp_path: Path) -> None:
    write_rows(tmp_path)
    cfg = config(tmp_path, "builtin:tiny-vl")
    run(cfg)
    (tmp_path / "run" / "result.json").unlink()
    write_image(tmp_path / "1.png", 48, 32, seed=99)
    again = config(tmp_path, "builtin:tiny-vl", run={"steps": 4})
    with pytest.raises(RunDirectoryError, match=r"1\.png"):
        run(again, resume=True, accept=["run.steps"])


def test_a_bad_image_far_down_a_file_is_found_before_a_run_begins(tmp_path: Path) -> None:
    names = [write_image(tmp_path / f"{n}.png", 16, 16, seed=n) for n in range(2)]
    rows = [{"prompt": "what?", "completion": "red", "images": [names[0]]}] * 40
    rows[39] = {"prompt": "what?", "completion": "red", "images": ["cut.png"]}
    (tmp_path / "cut.png").write_bytes((tmp_path / names[1]).read_bytes()[:200])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = config(tmp_path, "builtin:tiny-vl")
    with pytest.raises(DataError, match=r"rows\.jsonl:40: the image 'cut\.png'"):
        run(cfg)
    assert not cfg.run.directory.exists()


def test_what_is_not_built_yet_is_refused_with_the_reason(folder: Path) -> None:
    for sections, words in (
        ({"train": {"backend": "deepspeed", "tower_lr": 1e-4}}, "tower_lr"),
        ({"lora": {"rank": 2}, "model": {"freeze": "vision"}}, "freeze"),
        ({"train": {"tower_lr": 1e-4}, "model": {"freeze": "vision"}}, "tower_lr"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(folder, "builtin:tiny-vl", "refused", **sections)
    config(folder, "builtin:tiny", "text")
    for field in (
        "model.freeze=vision",
        "data.image_min_side=4",
        "data.image_roots=.",
        "train.tower_lr=1e-4",
    ):
        with pytest.raises(ConfigError, match="reads text alone"):
            load_config(folder / "text.yaml", [field])


def test_an_image_that_belongs_to_no_run_may_have_65536_pixels_to_a_side(tmp_path: Path) -> None:
    """Of the longest side that there may be it is the model that refuses: it reads text alone."""
    store = model_images("builtin:tiny", load_tokenizer("builtin:tiny"))
    path = tmp_path / "long.png"
    record = Record("asked:1", {"prompt": "what?", "images": [str(path)]}, start=0)
    for side, refused in (
        (65536, "'builtin:tiny' reads no images"),
        (65537, "65537 x 1 pixels, a side of more than 65536"),
    ):
        Image.new("RGB", (side, 1)).save(path)
        with pytest.raises(DataError, match=refused):
            store.prepared(record)
