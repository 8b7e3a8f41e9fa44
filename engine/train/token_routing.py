"""Route some of an image's tokens around blocks while training (TREAD, arXiv 2501.04765).

In each step, a random share of the image's tokens skips the blocks between two indexes, and is put
back in place after the last of them. Text and the rest of the image pass through the blocks.
Hooks on the blocks gather what belongs to the tokens that stay: rows of their own sequence, of
position embeddings and of masks. Diffusers gives a batch one table of positions, so one draw holds
for a whole step: it depends on the seed, the step and the number of tokens, and is the same however
a batch is split over forwards and ranks, and when a block is recomputed in backward.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.diffusion.random_numbers import TOKENS, keyed_generator
from jobs.spec.rules.token_routes import routes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.families import Family
    from engine.families.shared.base import TokenLayout
    from jobs.spec.job_spec import RecipeKeys

_TOKENS: Final = 1  # dimension of a stream, (B, tokens, channels)


class TokenRouting:
    """Routes tokens in the forwards of a step, if the job does.

    Samples and validation are outside of `step`, so all of their tokens pass through all blocks.

    Args:
        model: As it is trained: adapted, compiled, sharded.
        spec: The job.
        family: Its family.

    Raises:
        UserError: The model has no blocks of these numbers.
    """

    def __init__(self, model: torch.nn.Module, spec: RecipeKeys, family: Family) -> None:
        self._seed = spec.seed
        self._step: int | None = None
        self._counted = 0
        self._routes: list[_Route] = []
        if not spec.tread:
            return
        layout = family.TOKENS
        assert layout is not None, "a rule refuses other families"
        blocks = blocks_in_order(model, family)
        for first, last, share in routes_of(spec.tread, len(blocks)):
            number = len(self._routes)
            route = _Route(partial(self._kept, number, share), layout)
            self._routes.append(route)
            for block in blocks[first : last + 1]:
                names = list(signature(type(block).forward).parameters)[1:]
                hook = self._enter if block is blocks[first] else self._pass
                block.register_forward_pre_hook(partial(hook, route, names), with_kwargs=True)
            blocks[last].register_forward_hook(partial(self._leave, route))
        if layout.counted_by:
            model.get_submodule(layout.counted_by).register_forward_hook(self._count)
        model.register_forward_pre_hook(lambda *_: self._forget())

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Route tokens within, in forwards and backwards of a step, counted from 0."""
        self._step = number
        try:
            yield
        finally:
            self._step = None
            self._forget()
            for route in self._routes:
                route.indices.clear()

    def _forget(self) -> None:
        """Release what belongs to a forward."""
        for route in self._routes:
            route.whole, route.narrowed = None, {}

    def _kept(self, number: int, share: float, tokens: int) -> torch.Tensor:
        """Draw the tokens of an image that pass through a route's blocks, `(kept,)`, ascending."""
        assert self._step is not None
        generator = keyed_generator(self._seed, self._step, number, TOKENS)
        kept = max(1, tokens - round(share * tokens))
        return torch.randperm(tokens, generator=generator)[:kept].sort().values

    # -- hooks -----------------------------------------------------------------------------

    def _count(self, _: Any, __: Any, output: torch.Tensor) -> None:
        self._counted = output.shape[_TOKENS]

    def _enter(
        self,
        route: _Route,
        names: list[str],
        _: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any] | None:
        if self._step is None:
            return None
        name = names[0]
        whole = kwargs[name] if name in kwargs else args[0]
        route.whole, route.tokens = whole, self._counted or whole.shape[_TOKENS]
        kept = route.gathered(whole, _TOKENS)
        if name in kwargs:
            kwargs = kwargs | {name: kept}
        else:
            args = (kept, *args[1:])
        return route.narrow(names, args, kwargs)

    def _pass(
        self,
        route: _Route,
        names: list[str],
        _: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any] | None:
        return None if self._step is None else route.narrow(names, args, kwargs)

    def _leave(self, route: _Route, _: Any, __: Any, output: Any) -> Any:
        if self._step is None:
            return None
        if not isinstance(output, tuple):
            return route.put_back(output)
        place = route.layout.output
        return (*output[:place], route.put_back(output[place]), *output[place + 1 :])


@dataclass(eq=False)
class _Route:
    """A range of blocks that some tokens skip.

    Attributes:
        draw: Returns which of a number of tokens pass through, `(kept,)`.
        layout: How blocks of the family are given tokens.
        tokens: Of the image.
        whole: What was given to the first block, `(B, tokens, channels)`, maybe with text. Kept
            until the next forward, since the last block may be recomputed.
        narrowed: What blocks are given besides, by argument and place in it.
        indices: Rows that stay on the device, by the number of the image's and of the text's.
    """

    draw: Callable[[int], torch.Tensor]
    layout: TokenLayout
    tokens: int = 0
    whole: torch.Tensor | None = None
    narrowed: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    indices: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def index(self, text: int, device: torch.device) -> torch.Tensor:
        """Return which rows of a sequence pass through: all of its text, and of the image's some.

        Args:
            text: Rows of text in it.
            device: Where the sequence is.
        """
        key = self.tokens, text
        if key not in self.indices:
            rows = self.draw(self.tokens)
            if text and self.layout.text_first:
                rows = torch.cat([torch.arange(text), rows + text])
            elif text:
                rows = torch.cat([rows, torch.arange(text) + self.tokens])
            if device.type == "cuda":  # a copy from pinned memory does not wait
                rows = rows.pin_memory()
            self.indices[key] = rows.to(device, non_blocking=True)
        return self.indices[key]

    def gathered(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the rows of `value` along `dim` that pass through the blocks."""
        text = value.shape[dim] - self.tokens
        return value.index_select(dim, self.index(text, value.device))

    def narrow(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a block's arguments with those that belong to tokens narrowed to what stays."""
        given, changed = list(args), dict(kwargs)
        for name, (dims, dim) in self.layout.along.items():
            place = names.index(name) if name in names else len(given)
            if name in changed:
                changed[name] = self._narrowed(name, changed[name], dims, dim)
            elif place < len(given):
                given[place] = self._narrowed(name, given[place], dims, dim)
        return tuple(given), changed

    def _narrowed(self, name: str, value: Any, dims: int, dim: int) -> Any:
        if isinstance(value, tuple):
            count = 1 if name in self.layout.image_first else len(value)
            own = (self._part(name, n, part, dims, dim) for n, part in enumerate(value[:count]))
            return (*own, *value[count:])
        return self._part(name, 0, value, dims, dim)

    def _part(self, name: str, number: int, value: Any, dims: int, dim: int) -> Any:
        """Narrow one tensor; what is the same for all tokens has other sizes, and is left alone."""
        if not isinstance(value, torch.Tensor) or value.dim() != dims:
            return value
        if value.shape[dim] < self.tokens:
            return value
        if value.requires_grad:  # within each block, since checkpoints recompute each by itself
            return self.gathered(value, dim)
        if (name, number) not in self.narrowed:  # a model gives the same one to all of its blocks
            self.narrowed[name, number] = self.gathered(value, dim)
        return self.narrowed[name, number]

    def put_back(self, passed: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence, with what passed through in its place.

        Args:
            passed: The last block's output, `(B, kept, channels)`, with text if it has it then.
        """
        assert self.whole is not None
        whole = self.whole.to(passed.dtype)
        before = whole.shape[_TOKENS] - self.tokens  # rows of text in it
        kept = len(self.index(0, whole.device))
        text = passed.shape[_TOKENS] - kept - before
        if not text:
            return whole.index_copy(_TOKENS, self.index(before, whole.device), passed)
        # Blocks in between have put the text into the image's sequence.
        sizes = (text, kept) if self.layout.text_first else (kept, text)
        parts = list(passed.split(sizes, _TOKENS))
        place = int(self.layout.text_first)
        parts[place] = whole.index_copy(_TOKENS, self.index(0, whole.device), parts[place])
        return torch.cat(parts, _TOKENS)


def blocks_in_order(model: torch.nn.Module, family: Family) -> list[torch.nn.Module]:
    """Return a model's blocks that tokens can be routed around, in the order of forward."""
    lists = map(model.get_submodule, family.facts.routed_blocks)
    return [block for blocks in lists for block in blocks.children()]


def ends_of_routes(model: torch.nn.Module, spec: RecipeKeys, family: Family) -> set[str]:
    """Return the names of the blocks where tokens leave and come back."""
    if not spec.tread:
        return set()
    blocks = blocks_in_order(model, family)
    routes = routes_of(spec.tread, len(blocks))
    ends = {blocks[place] for first, last, _ in routes for place in (first, last)}
    return {name for name, module in model.named_modules() if module in ends}
