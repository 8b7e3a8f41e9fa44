"""What is whole on every rank: gradients averaged and clipped alike, copies that stay the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from engine.model.files.weights import build_on_meta, local_part, materialise, reading_of, stream
from engine.parallel.replica_check import check_replicas
from engine.ranks.mesh import build_mesh, sharding_mesh
from engine.ranks.world import World
from engine.train import gradients
from engine.train.gradients import average_gradients, clip
from engine.train.optimizer import build_optimizer
from jobs.spec.job_spec import JobSpec
from tests.support.engine.forked import on_ranks
from tests.support.engine.toy_jobs import ALONE
from tests.support.engine.weights import Tiny, full, tiny_tensors, write

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def parameter(*values: float, gradient: list[float] | None = None) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.tensor(values))
    made.grad = None if gradient is None else torch.tensor(gradient)
    return made


def sharded(rank: int, ranks: int, strategy: str, **values: Any) -> tuple[torch.nn.Linear, World]:
    """A layer of ones over all ranks, its gradient the number of the row + 1, and the ranks."""
    spec = JobSpec(num_processes=ranks, strategy=strategy, **values)
    mesh = build_mesh(spec, strategy, ranks, "cpu")
    assert mesh is not None
    layer = torch.nn.Linear(3, 4, bias=False)
    torch.nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=sharding_mesh(mesh))
    weight = layer.weight
    assert isinstance(weight, DTensor)
    rows = torch.arange(1.0, 5.0).repeat_interleave(3).view(4, 3)
    own = rows.chunk(sharding_mesh(mesh).size(-1))[sharding_mesh(mesh).get_local_rank(-1)]
    weight.grad = DTensor.from_local(own, weight.device_mesh, weight.placements)
    return layer, World(rank, ranks, CPU, strategy, "t", mesh=mesh)


# -- gradients ---------------------------------------------------------------------------------


def test_one_ranks_gradients_stay_as_they_are() -> None:
    used, unused = parameter(1.0, gradient=[3.0]), parameter(1.0)
    average_gradients([used, unused], ALONE)
    assert used.grad is not None
    assert used.grad.tolist() == [3.0]
    assert unused.grad is None, "nothing is allocated for it"


def test_plain_gradients_become_their_mean_and_sharded_ones_stay(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        layer, world = sharded(rank, 2, "fsdp2")
        both = parameter(0.0, 0.0, gradient=[1.0 + rank, 4.0 * rank])
        # In another precision, and on one rank only, as a layer that a sample may skip.
        one = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        if rank == 1:
            one.grad = torch.tensor([2.0, 4.0, 8.0], dtype=torch.bfloat16)
        average_gradients([both, layer.weight, one], world)
        return both.grad, local_part(layer.weight.grad), one.grad

    found = on_ranks(work, 2, tmp_path)
    for rank, (both, own, one) in enumerate(found):
        assert both.tolist() == [1.5, 2.0]
        assert one.tolist() == [1.0, 2.0, 4.0]
        assert one.dtype is torch.bfloat16
        assert own.tolist() == [[1.0 + 2 * rank] * 3, [2.0 + 2 * rank] * 3]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([4, 4, 4], [8, 4]),  # two fill a bucket to its last element
        ([4, 5, 3], [4, 8]),  # the second would be one element too many
        ([20, 1, 7], [20, 8]),  # one that is larger than a bucket goes alone
        ([8], [8]),
    ],
)
def test_gradients_travel_in_buckets_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], wanted: list[int]
) -> None:
    """The flat copy is what averaging takes of memory beside the gradients."""
    monkeypatch.setattr(gradients, "BUCKET", 8)
    tensors = [torch.zeros(size) for size in sizes]
    buckets = [list(bucket) for bucket in gradients.buckets(tensors)]
    assert [sum(tensor.numel() for tensor in bucket) for bucket in buckets] == wanted
    assert [id(t) for bucket in buckets for t in bucket] == [id(t) for t in tensors], "in order"


def test_several_buckets_are_averaged_like_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gradients, "BUCKET", 4)

    def work(rank: int) -> Any:
        sizes = ((2,), (3, 1), (2, 3), (1,))
        plain = [torch.nn.Parameter(torch.zeros(shape)) for shape in sizes]
        for number, one in enumerate(plain):
            one.grad = torch.arange(float(one.numel())).view(one.shape) + number + 10 * rank
        average_gradients(plain, World(rank, 2, CPU, "ddp", "t"))
        return [one.grad for one in plain]

    for found in on_ranks(work, 2, tmp_path):
        for number, gradient in enumerate(found):
            wanted = torch.arange(float(gradient.numel())).view(gradient.shape) + number + 5
            assert torch.equal(gradient, wanted)


def test_many_shards_are_clipped_in_parts_by_one_norm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gradients, "AT_ONCE", 2)

    def work(rank: int) -> Any:
        layers = [sharded(rank, 2, "fsdp2") for _ in range(5)]
        weights = [layer.weight for layer, _ in layers]
        for number, weight in enumerate(weights):
            weight.grad = weight.grad * (number + 1)
        whole = parameter(0.0, gradient=[4.0])
        parts = [len(part) for part in gradients.parts_of([whole, *weights])]
        norm = clip([weights[0], whole, *weights[1:]], 1.0, layers[0][1])
        grads = [weight.grad for weight in weights]
        return parts, norm, whole.grad, [g.full_tensor() for g in grads if isinstance(g, DTensor)]

    rows = torch.arange(1.0, 5.0).repeat_interleave(3).view(4, 3)
    expected = (sum((n * rows).square().sum() for n in range(1, 6)) + 16.0).sqrt()
    for parts, norm, whole, grads in on_ranks(work, 2, tmp_path):
        assert parts == [2, 2, 1, 1]
        assert torch.allclose(norm, expected)
        assert torch.allclose(whole, torch.tensor([4.0]) / expected, atol=1e-5)
        for number, gradient in enumerate(grads):
            assert torch.allclose(gradient, (number + 1) * rows / expected, atol=1e-5)


def test_few_buckets_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a copy of its gradients; none is waited for before there are as many as may be."""
    sent: list[int] = []
    waiting: list[int] = []

    class Work:
        def wait(self) -> None:
            waiting.append(len(sent))

    def all_reduce(flat: torch.Tensor, **_: Any) -> Work:
        sent.append(flat.numel())
        return Work()

    monkeypatch.setattr(gradients, "BUCKET", 1)
    monkeypatch.setattr(gradients.dist, "all_reduce", all_reduce)
    plain = [parameter(0.0, gradient=[2.0]) for _ in range(5)]
    average_gradients(plain, World(0, 2, CPU, "ddp", "t"))
    assert gradients.UNDER_WAY == 2
    assert waiting == [3, 4, 5, 5, 5], "how many were sent when the first, second, … was awaited"
    assert [one.grad.tolist() for one in plain if one.grad is not None] == [[1.0]] * 5


def test_from_the_second_step_on_buckets_are_sent_while_backward_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []

    class Work:
        def wait(self) -> None:
            pass

    def all_reduce(flat: torch.Tensor, **_: Any) -> Work:
        sent.append(flat.numel())
        return Work()

    monkeypatch.setattr(gradients, "BUCKET", 1)
    monkeypatch.setattr(gradients.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(World, "from_main", lambda self, value: value)
    plain = [parameter(*[2.0] * length) for length in (1, 2, 3)]
    averager = gradients.Averager(plain, World(0, 2, CPU, "ddp", "t"))
    averager.watch()

    def backward() -> list[int]:
        sent.clear()
        first, second, third = plain
        (third.sum() * second.sum() * first.sum()).backward()
        return list(sent)

    for expected in ([], [1, 2, 3], [1, 2, 3]):  # not as they lie, but as backward fills them
        assert backward() == [], "a micro-batch that is not the last of its step"
        averager.begin()
        during = backward()
        averager.finish()
        assert during == expected
        assert sorted(sent) == [1, 2, 3], "each once"
        for one, wanted in zip(plain, (4.0 * 6.0, 2.0 * 6.0, 2.0 * 4.0), strict=True):
            assert one.grad is not None
            assert one.grad.tolist() == [2 * wanted / 2] * one.numel(), "two of them, two ranks"
            one.grad = None


def test_the_norm_of_shards_in_host_memory_joins_that_of_what_the_device_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL sends nothing that lies in host memory. The device is `meta` here."""

    def work(rank: int) -> Any:
        layer, world = sharded(rank, 1, "fsdp2")
        whole = torch.nn.Parameter(torch.zeros(2, device="meta"))
        whole.grad = torch.zeros(2, device="meta")
        return str(clip([layer.weight, whole], 0.0, world).device)

    assert on_ranks(work, 1, tmp_path) == ["meta"]


def test_the_norm_is_over_all_and_what_is_too_long_is_scaled_to_the_limit() -> None:
    def two() -> list[torch.nn.Parameter]:
        return [parameter(1.0, gradient=[3.0]), parameter(1.0), parameter(1.0, gradient=[4.0])]

    for limit, factor in ((0.0, 1.0), (10.0, 1.0), (1.0, 0.2)):
        some = two()
        assert clip(some, limit, ALONE).item() == pytest.approx(5.0)
        wanted = [pytest.approx(3.0 * factor), None, pytest.approx(4.0 * factor)]
        assert [None if p.grad is None else p.grad.item() for p in some] == wanted


@pytest.mark.parametrize("length", [1e-8, 1.0, 7.3])
def test_what_is_clipped_is_what_torch_would_make_of_it(length: float) -> None:
    ours, theirs = (parameter(1.0, 1.0, gradient=[length, 0.0]) for _ in range(2))
    clip([ours], 1.0, ALONE)
    torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp2", 2), ("hsdp", 4)])
def test_shards_and_whole_tensors_are_clipped_by_one_norm(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    def work(rank: int) -> Any:
        replicas = {"dp_replicate_size": 2} if strategy == "hsdp" else {}
        layer, world = sharded(rank, ranks, strategy, **replicas)
        # As if the last bits of a rank's own sum were others: all take rank 0's norm.
        whole = parameter(0.0, gradient=[4.0 if rank == 0 else 4.1])
        norm = clip([layer.weight, whole], 1.0, world)
        whole_layer = layer.weight.grad.full_tensor()
        broadcasts: list[None] = []
        broadcast = dist.broadcast
        dist.broadcast = lambda *words, **more: [broadcasts.append(None), broadcast(*words, **more)]
        shards_alone = clip([layer.weight], 0.0, world)
        assert len(broadcasts) == (strategy == "hsdp"), "shards alone have one norm on all ranks"
        return norm, whole.grad, whole_layer, shards_alone

    length = (3 * (1 + 4 + 9 + 16) + 16) ** 0.5
    for rank, (norm, own, layer, alone) in enumerate(on_ranks(work, ranks, tmp_path)):
        assert norm.item() == pytest.approx(length)
        assert own.item() == pytest.approx((4.0 if rank == 0 else 4.1) / length, rel=1e-4)
        assert layer[:, 0].tolist() == pytest.approx([n / length for n in (1, 2, 3, 4)], rel=1e-4)
        assert alone.item() == pytest.approx(90**0.5 / length, rel=1e-4)


# -- copies ------------------------------------------------------------------------------------


def said_of(trained: dict[str, torch.nn.Parameter], world: World) -> str:
    try:
        check_replicas(trained, world)
    except RuntimeError as error:
        return str(error)
    return ""


def test_one_rank_has_no_copies_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("one rank has nobody to talk to")

    monkeypatch.setattr("torch.distributed.all_reduce", refuse)
    assert said_of({"w": parameter(1.0)}, ALONE) == ""


def test_a_copy_that_differs_in_its_last_bit_is_named(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        trained = {"a": parameter(1.0), "b": parameter(1.0, 2.0), "c": parameter(1.0)}
        world = World(rank, 2, CPU, "ddp", "t")
        before = said_of(trained, world)
        if rank == 1:
            with torch.no_grad():
                trained["b"][1] = torch.nextafter(trained["b"][1], torch.tensor(3.0))
        return before, said_of(trained, world)

    for before, after in on_ranks(work, 2, tmp_path):
        assert before == ""
        assert after == "the ranks' copies of 1 trained tensors differ, such as b"


def test_shards_differ_and_are_no_copies_of_each_other(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        layer, world = sharded(rank, 2, "fsdp2")
        local_part(layer.weight.detach()).fill_(rank)
        return said_of({"shards": layer.weight, "whole": parameter(1.0)}, world)

    assert on_ranks(work, 2, tmp_path) == ["", ""]


def test_replicas_of_shards_are_compared_with_each_other_alone(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        layer, world = sharded(rank, 4, "hsdp", dp_replicate_size=2)
        own = local_part(layer.weight.detach())
        own.fill_(rank % 2)  # ranks 0 and 2 hold one half of the rows, 1 and 3 the other
        before = said_of({"w": layer.weight}, world)
        if rank == 3:
            own[0, 0] += 1
        return before, said_of({"w": layer.weight}, world)

    found = on_ranks(work, 4, tmp_path)
    assert [before for before, _ in found] == [""] * 4
    wrong = "the ranks' copies of 1 trained tensors differ, such as w"
    assert [after for _, after in found] == ["", wrong, "", wrong]


# -- shards that are read from files -----------------------------------------------------------


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp2", 2), ("hsdp", 4)])
def test_each_rank_reads_its_own_rows(tmp_path: Path, strategy: str, ranks: int) -> None:
    tensors = tiny_tensors()
    del tensors["embed.weight"]
    directory = write(tmp_path / "m", tensors)
    replicas = {"dp_replicate_size": 2} if strategy == "hsdp" else {}
    spec = full(tmp_path, num_processes=ranks, strategy=strategy, **replicas)

    def work(rank: int) -> Any:
        mesh = build_mesh(spec, strategy, ranks, "cpu")
        assert mesh is not None
        model: Any
        model, stored = build_on_meta(Tiny, directory, spec)
        fully_shard(model, mesh=sharding_mesh(mesh))
        materialise(model, CPU)
        read = stream(model, stored)
        parameters = dict(model.named_parameters())
        here = {name: local_part(p).shape[0] for name, p in parameters.items()}
        columns = distribute_tensor(torch.zeros(3, 4), sharding_mesh(mesh)["dp_shard"], [Shard(1)])
        with pytest.raises(RuntimeError, match=r"inner.weight is sharded as .*only rows can"):
            reading_of("inner.weight", stored["inner.weight"], columns)
        return read, here, {name: p.full_tensor() for name, p in parameters.items()}

    found = on_ranks(work, ranks, tmp_path)
    buffers = tensors["mean"].nbytes + tensors["count"].nbytes
    weights = sum(tensor.nbytes for tensor in tensors.values()) - buffers
    assert sum(read for read, _, _ in found) == weights * ranks // 2 + buffers * ranks
    assert [here["embed.weight"] for _, here, _ in found] == [4, 3] * (ranks // 2)
    for _, _, whole in found:
        assert torch.equal(whole.pop("embed.weight"), tensors["head.weight"])
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in whole.items())


# -- shards in host memory ---------------------------------------------------------------------


def test_shards_may_lie_elsewhere_and_what_is_whole_does_not(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        mesh = build_mesh(JobSpec(num_processes=2), "fsdp2", 2, "cpu")
        assert mesh is not None
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        fully_shard(model, mesh=sharding_mesh(mesh), ignored_params={model[1].weight})
        devices = []
        for parameters_on in (CPU, None):
            materialise(model, torch.device("meta"), parameters_on)
            devices.append({name: t.device.type for name, t in model.state_dict().items()})
        return devices

    ((offloaded, together), _) = on_ranks(work, 2, tmp_path)
    assert [name for name, device in offloaded.items() if device == "cpu"] == [
        "0.weight",
        "0.bias",
        "1.bias",
    ]
    assert "1.weight" in offloaded
    assert "1.running_mean" in offloaded
    assert set(together.values()) == {"meta"}


@pytest.mark.parametrize("optimizer", ["adafactor", "came"])
def test_replicas_take_equal_steps_whatever_the_order_of_their_sums(
    tmp_path: Path, optimizer: str
) -> None:
    def work(rank: int) -> Any:
        layer, _ = sharded(rank, 4, "hsdp", dp_replicate_size=2)
        add_up = dist.all_reduce

        def in_another_order(tensor: torch.Tensor, *words: Any, **more: Any) -> Any:
            work = add_up(tensor, *words, **more)
            if rank > 1:  # the second replica; by more than last bits, which a step may round away
                tensor.mul_(torch.linspace(1, 1.1, len(tensor)))
            return work

        dist.all_reduce = in_another_order
        spec = JobSpec(optimizer=optimizer, learning_rate=1e-2)
        build_optimizer(spec, [layer.weight], CPU).step()
        return local_part(layer.weight.detach())

    found = on_ranks(work, 4, tmp_path)
    assert all(map(torch.equal, found[:2], found[2:]))
