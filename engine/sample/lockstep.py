"""Ranks that share a model make as many forwards each, whatever images they make.

A sharded transformer gathers its weights in every forward, together with the other ranks. A rank
that needs fewer forwards makes up for them, so that none waits for one that is done. How many there
will be is known in advance: nothing has to be agreed on while sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import torch


def rounds_of(
    forwards: Sequence[int], ranks: int, kinds: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Group the images that are made at the same time, one on each rank. Pure.

    Those that take equally many forwards go together, the longest first, which takes the fewest
    forwards overall; ranks without an image are left for the shortest.

    Args:
        forwards: Of each image.
        ranks: How many images are made at a time.
        kinds: Of each image; those of different kinds are not made at the same time.
    """
    order = sorted(range(len(forwards)), key=lambda number: -forwards[number])
    by_kind: dict[Hashable, list[int]] = {}
    for number in order:
        by_kind.setdefault(kinds[number] if kinds else None, []).append(number)
    return [own[n : n + ranks] for own in by_kind.values() for n in range(0, len(own), ranks)]


class Forwards:
    """Counts the forwards of models, within a context, and makes more of them after the last.

    These are made while the pipeline is still in its last forward: what it changes of a model, such
    as masks, which flash attention does not take, is only changed meanwhile.

    Args:
        models: The models.
        moved: Called after each forward.
        expected: How many the pipeline makes.
        total: How many all ranks make, with the inputs of the last one, if that is more; a
            collective.

    Attributes:
        made: How many the pipeline has made so far.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        moved: Callable[[], None],
        *,
        expected: int = 0,
        total: int = 0,
    ) -> None:
        self._models = list(models)
        self._moved = moved
        self._expected = expected
        self._more = max(total - expected, 0)
        self._filling = False
        self._last: tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
        self.made = 0

    def __enter__(self) -> Forwards:
        self._hooks = [
            hook
            for model in self._models
            for hook in (
                model.register_forward_pre_hook(self._remember, with_kwargs=True),
                model.register_forward_hook(self._count),
            )
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._last = None

    def check(self, pipeline: Any) -> None:
        """Compare what a pipeline made with what was planned for.

        Raises:
            RuntimeError: The other ranks would wait for forwards that never come, or miss some.
        """
        if self.made != self._expected:
            raise RuntimeError(
                f"{type(pipeline).__name__} made {self.made} forwards of the denoiser instead of "
                f"{self._expected}; forwards_of the family, or its scheduler, is "
                "not what this version of diffusers does"
            )

    def _fill_up(self) -> None:
        """Make the forwards that the pipeline does not make."""
        assert self._last is not None, "this is the hook of a forward"
        model, positional, named = self._last
        self._filling = True
        for _ in range(self._more):
            model(*positional, **named)
        self._filling = False

    def _remember(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._last = (model, args, kwargs)

    def _count(self, *_: Any) -> None:
        self._moved()
        if self._filling:
            return
        self.made += 1
        if self.made == self._expected:
            self._fill_up()
