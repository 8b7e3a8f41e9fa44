"""HiDream-I1: sizes, experts, and the Llama that a person has to bring."""

from __future__ import annotations

import copy
import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import HiDreamImagePipeline, HiDreamImageTransformer2DModel
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

from engine import families
from engine.families.shared import hidream_experts
from engine.families.shared.hidream_experts import call_every_expert
from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.adapters.lora import add_lora, lora_parameters
from engine.toy.components.weights import one_thread
from jobs.errors import SpecError, UserError
from jobs.preflight.check_job import check_model
from tests.support.engine.families import PROMPT, Case, batch_of, quiet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = ["64x64", "96x64", "80x208"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root: Path = tmp_path_factory.getbasetemp().parent / "families"
    return Case("hidream", root)


@pytest.fixture
def transformer(case: Case) -> Any:
    with quiet():
        return HiDreamImageTransformer2DModel.from_pretrained(case.paths.model / "transformer")


@pytest.fixture
def published(case: Case, tmp_path: Path) -> Path:
    """The toy without what the published models lack."""
    root = tmp_path / "published"
    shutil.copytree(case.paths.model, root)
    index = json.loads((root / "model_index.json").read_text())
    for part in ("text_encoder_4", "tokenizer_4"):
        shutil.rmtree(root / part)
        del index[part]
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def draw(case: Case, width: int, height: int, batch: int = 2) -> tuple[Any, ...]:
    """Noisy latents, levels and encoded prompts."""
    generator = torch.Generator().manual_seed(width)
    noisy = torch.randn(batch, 16, height // 8, width // 8, generator=generator)
    texts = [case.encoded(PROMPT), case.encoded("a star")][:batch]
    return noisy, torch.tensor([0.9, 0.25][:batch]), batch_of(*texts)


@pytest.mark.parametrize("size", SIZES)
def test_the_stock_pipeline_itself_makes_the_same(case: Case, size: str) -> None:
    """Ours differs by the attribute that is set here, and by how experts are called."""
    ours = case.stock()
    with quiet():
        stock = HiDreamImagePipeline(**ours.components)
    stock.set_progress_bar_config(disable=True)
    request = case.request(resolution=size, guidance=3.0, negative_prompt="a green star")
    stock.default_sample_size = (request.width * request.height) ** 0.5 / 8 * (1 + 1e-9)
    expected = case.run(stock, request, output_type="latent")
    experts = [m for m in stock.transformer.modules() if isinstance(m, MOEFeedForwardSwiGLU)]
    assert not any(expert.training for expert in experts), "the stock pipeline ran as it is"
    found = case.run(ours, request, output_type="latent")
    assert found.shape == (1, 16, request.height // 8, request.width // 8)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("size", ["64x64", "96x64", "32x32"])
def test_training_computes_what_sampling_does(
    case: Case, transformer: Any, size: str, forced: bool
) -> None:
    """Also with a config that says `force_inference_output`, and experts learn in any case."""
    width, height = (int(side) for side in size.split("x"))
    noisy, level, condition = draw(case, width, height)
    with torch.no_grad():
        expected = -transformer.eval()(
            hidden_states=noisy,
            timesteps=level * 1000,
            encoder_hidden_states_t5=condition["prompt_embeds_t5"],
            encoder_hidden_states_llama3=condition["prompt_embeds_llama3"].transpose(0, 1),
            pooled_embeds=condition["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
    if forced:
        transformer.register_to_config(force_inference_output=True)
        for module in transformer.modules():
            if hasattr(module, "_force_inference_output"):
                module._force_inference_output = True
    found = case.family.predict(transformer.train(), noisy, level, condition, 1.0)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    found.square().mean().backward()
    learned = [
        float(parameter.grad.abs().sum())
        for name, parameter in transformer.named_parameters()
        if ".experts." in name and parameter.grad is not None
    ]
    assert sum(amount > 0 for amount in learned) > 20


def test_routed_experts_are_adapted_only_if_asked_for(case: Case, transformer: Any) -> None:
    linear = [n for n, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    usual, more = (
        {n for n in linear if re.fullmatch(case.family.lora_targets(case.spec(**changes)), n)}
        for changes in ({}, {"lora_experts": True})
    )
    assert not any(".experts." in name for name in usual)
    assert any(".shared_experts." in name for name in usual)
    assert more - usual == {name for name in linear if ".experts." in name}


def test_every_expert_is_called_though_no_token_is_for_it(case: Case, transformer: Any) -> None:
    """Its weights may be a unit of their own: other ranks wait for this one to gather them."""
    called = set()
    for name, module in transformer.named_modules():
        if ".experts." in name and name.rpartition(".")[2].isdigit():
            module.register_forward_hook(lambda *_, name=name: called.add(name))
    for name, parameter in transformer.named_parameters():
        if name.endswith("ff_i.gate.weight"):
            parameter.data.zero_()  # all are alike, so the first two are chosen
    noisy, level, condition = draw(case, 64, 64, batch=1)
    for mode in (True, False):
        called.clear()
        with torch.no_grad():
            case.family.predict(transformer.train(mode), noisy, level, condition, 1.0)
        assert len(called) == 4 * 4, "four experts in each of four blocks"


@pytest.mark.parametrize("empty", [False, True])
def test_experts_compute_and_learn_what_those_of_diffusers_do(empty: bool) -> None:
    """Also where no token is for two of them."""
    torch.manual_seed(0)
    theirs = MOEFeedForwardSwiGLU(16, 24, num_routed_experts=4, num_activated_experts=2).train()
    if empty:
        theirs.gate.weight.data[2:] = -9 * theirs.gate.weight.data[:2].sum(dim=0)
    ours = copy.deepcopy(theirs)
    call_every_expert(ours)
    found = []
    for experts in (ours, theirs, copy.deepcopy(ours)):
        x = torch.rand(2, 20, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        made = experts(x)
        made.square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
        found.append(gradients | {"": made.detach(), "x": x.grad})
    chosen = ours.gate(x)[0]
    assert (len(chosen.unique()) == 2) is empty
    for name, wanted in found[1].items():
        for other in (found[0], found[2]):
            assert torch.allclose(other[name], wanted, rtol=1e-5, atol=1e-6), name
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("policy", ["", "full", "selective"])
@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.5},
        {"lora_variant": "dora"},
        {"lora_variant": "lokr", "lora_rank": 2},
        {"lora_variant": "lokr", "lokr_full_matrix": True},
    ],
    ids=json.dumps,
)
def test_adapters_of_experts_without_tokens_have_gradients(
    case: Case, transformer: Any, changes: dict[str, Any], policy: str
) -> None:
    """Ranks add up the gradients of all that they train, whatever each has sent where."""
    for name, parameter in transformer.named_parameters():
        if name.endswith("ff_i.gate.weight"):
            parameter.data.zero_()  # all are alike, so the first two are chosen
    if policy:
        changes = changes | {
            "gradient_checkpointing": True,
            "gradient_checkpointing_policy": policy,
        }
    spec = case.spec(lora_experts=True, **{"lora_rank": 4} | changes)
    add_lora(transformer.requires_grad_(False), spec, case.family.lora_targets(spec))
    if policy:
        checkpoint_activations(transformer, spec)
    case.family.predict(transformer.train(), *draw(case, 64, 64), 1.0).square().mean().backward()
    trained = lora_parameters(transformer)
    assert any(".experts.3." in name for name in trained)
    assert not [name for name, parameter in trained.items() if parameter.grad is None]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("size", [(64, 64), (96, 64)])
def test_a_forward_reads_the_device_once_a_block(
    case: Case,
    transformer: Any,
    monkeypatch: pytest.MonkeyPatch,
    mode: bool,
    size: tuple[int, int],
) -> None:
    """Tensors without numbers go through it, but for the bounds of experts' tokens."""
    read: list[torch.Size] = []

    def read_later(bounds: torch.Tensor) -> Any:
        read.append(bounds.shape)
        return lambda: [3, 5, 5]

    monkeypatch.setattr(hidream_experts, "_read_later", read_later)
    noisy, level, condition = draw(case, *size)
    found = case.family.predict(
        transformer.train(mode).to("meta"),
        noisy.to("meta"),
        level.to("meta"),
        {name: text.to("meta") for name, text in condition.items()},
        1.0,
    )
    assert found.shape == noisy.shape
    assert read == [(3,)] * 4


def test_diffusers_asks_which_tokens_are_whose_still(case: Case, transformer: Any) -> None:
    """Once it does not, `call_every_expert` can go (docs/upstream.md)."""
    experts = next(m for m in transformer.modules() if isinstance(m, MOEFeedForwardSwiGLU))
    with pytest.raises(NotImplementedError, match="nonzero"):
        experts.train().to("meta")(torch.empty(1, 4, experts.gate.gating_dim, device="meta"))


def test_diffusers_sends_sizes_to_the_device_still(transformer: Any) -> None:
    """Once it does not, `sizes_on_host` can go (docs/upstream.md)."""
    sizes = transformer.to("meta").patchify(torch.empty(1, 16, 8, 8, device="meta"))[2]
    assert sizes.device.type == "meta"


def test_a_picture_with_more_tokens_than_are_filled_up_is_refused(
    case: Case, transformer: Any
) -> None:
    noisy, level, condition = draw(case, 1024, 272, batch=1)
    with pytest.raises(UserError, match=r"1024x272 has 1088 tokens.* 1024 .*resolution: 512"):
        case.family.predict(transformer, noisy, level, condition, 1.0)


@pytest.mark.parametrize("left", [(), ("text_encoder_4",), ("tokenizer_4",)])
def test_a_missing_llama_is_said_before_anything_is_loaded(
    case: Case, published: Path, left: tuple[str, ...]
) -> None:
    for part in left:
        shutil.copytree(case.paths.model / part, published / part)
    spec = case.spec(pretrained_model_name_or_path=str(published))
    with pytest.raises(SpecError, match="not part of the published HiDream-I1") as caught:
        check_model(spec)
    for part in {"text_encoder_4", "tokenizer_4"} - set(left):
        assert f"into {published / part}" in str(caught.value)
    assert ("Llama-3.1-8B-Instruct" in str(caught.value)) == ("text_encoder_4" not in left)


def test_a_llama_that_the_index_does_not_name_is_used(case: Case, published: Path) -> None:
    for part in ("text_encoder_4", "tokenizer_4"):
        shutil.copytree(case.paths.model / part, published / part)
    check_model(case.spec(pretrained_model_name_or_path=str(published)))
    family = families.load("hidream", "full", published)
    with quiet(), torch.no_grad():
        text = family.load_text_pipeline(published, torch.float32)
        encoded = family.encode(text, PROMPT, 64)
        bare = family.sampling_pipeline(published, None, None)
    assert bare.text_encoder_4 is None
    for name, tensor in case.encoded(PROMPT).items():
        assert torch.equal(encoded[name], tensor)


def test_pictures_of_dev_depend_on_their_seed_alone(tmp_path_factory: Any) -> None:
    """Its scheduler draws in every step."""
    case = Case("hidream:dev", tmp_path_factory.getbasetemp().parent / "families")
    pipeline, request = case.stock(), case.request(num_inference_steps=3)
    torch.manual_seed(1)
    first = case.run(pipeline, request, output_type="latent")
    after = torch.rand(1)
    again = case.run(pipeline, request, output_type="latent")
    other = case.run(pipeline, case.request(seed=request.seed + 1), output_type="latent")
    torch.manual_seed(1)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=1e-2)
    assert torch.equal(after, torch.rand(1)), "and the process draws as if there had been none"
