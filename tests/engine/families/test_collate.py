"""Several encoded texts as one batch."""

from __future__ import annotations

import pytest
import torch

from engine.families.shared.collate import collate


def text(length: int, *, width: int = 3, value: float = 1.0) -> dict[str, torch.Tensor]:
    """As families encode: a sequence, its mask, and a summary without a length."""
    return {
        "prompt_embeds": torch.full((length, width), value),
        "prompt_attention_mask": torch.ones(length, dtype=torch.int64),
        "pooled": torch.full((7,), value),
    }


def test_texts_of_one_length_are_stacked() -> None:
    batch = collate([text(4), text(4, value=2.0)])
    assert batch["prompt_embeds"].shape == (2, 4, 3)
    assert batch["prompt_embeds"][:, 0, 0].tolist() == [1.0, 2.0]
    assert batch["pooled"].shape == (2, 7)
    assert bool(batch["prompt_attention_mask"].all())


def test_shorter_texts_are_filled_up_at_the_end_and_masked() -> None:
    batch = collate([text(2), text(4), text(1)])
    assert batch["prompt_embeds"].shape == (3, 4, 3)
    assert batch["prompt_attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch["prompt_attention_mask"].dtype is torch.int64
    attended = batch["prompt_attention_mask"].bool()
    assert bool((batch["prompt_embeds"][attended] == 1).all())
    assert bool((batch["prompt_embeds"][~attended] == 0).all())


def test_what_is_not_as_long_as_its_mask_stays_as_it_is() -> None:
    batch = collate([text(2), text(4)])
    assert batch["pooled"].tolist() == [[1.0] * 7] * 2


def test_a_batch_does_not_depend_on_the_order_but_for_its_own() -> None:
    forth, back = collate([text(2), text(4, value=2.0)]), collate([text(4, value=2.0), text(2)])
    for name, tensor in forth.items():
        assert torch.equal(tensor, back[name].flip(0))


@pytest.mark.parametrize(("multiple", "length"), [(1, 5), (2, 6), (4, 8), (5, 5), (8, 8)])
def test_lengths_become_a_multiple(multiple: int, length: int) -> None:
    """Ranks that share a sample's tokens need as many each, also with a batch of one."""
    for texts in ([text(5)], [text(5), text(3)]):
        batch = collate(texts, multiple=multiple)
        assert batch["prompt_embeds"].shape == (len(texts), length, 3)
        assert batch["prompt_attention_mask"].sum(dim=1).tolist()[0] == 5


def test_without_masks_nothing_is_filled_up() -> None:
    plain = {"prompt_embeds": torch.ones(3, 2)}
    assert collate([plain, plain], multiple=4)["prompt_embeds"].shape == (2, 3, 2)
    with pytest.raises(RuntimeError, match="equal size"):
        collate([plain, {"prompt_embeds": torch.ones(4, 2)}])


def test_each_kind_of_tensor_keeps_its_own() -> None:
    """Precision, and any number of dimensions behind the length."""
    first = {
        "layers": torch.ones(2, 3, 4, dtype=torch.bfloat16),
        "mask": torch.ones(2, dtype=torch.bool),
        "scale": torch.tensor(7.0),
    }
    second = {**first, "layers": first["layers"][:1], "mask": first["mask"][:1]}
    batch = collate([first, second])
    assert batch["layers"].shape == (2, 2, 3, 4)
    assert batch["layers"].dtype is torch.bfloat16
    assert batch["mask"].tolist() == [[True, True], [True, False]]
    assert batch["scale"].tolist() == [7.0, 7.0]


def test_the_texts_themselves_stay_as_they_are() -> None:
    """They may be kept and used again."""
    short = text(1)
    collate([short, text(3)])
    assert short["prompt_embeds"].shape == (1, 3)
    collate([short])["prompt_embeds"].zero_()
    assert bool((short["prompt_embeds"] == 1).all())
