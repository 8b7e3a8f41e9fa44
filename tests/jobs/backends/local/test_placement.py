"""Which queued job starts where: what must hold for every queue on every machine."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import units
from jobs.backends.local.placement import Request, Start, Wait, place

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"


@dataclass(frozen=True)
class Case:
    """Arguments of `place`."""

    queue: list[Request]
    claims: dict[str, int]
    devices: list[str]
    on_cpu: list[int]
    slots: int
    foreign: dict[str, str]

    def decide(self) -> list[Start | Wait]:
        return place(self.queue, self.claims, self.devices, self.on_cpu, self.slots, self.foreign)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    devices = [f"GPU-{n}" for n in range(draw(st.integers(0, 6)))]
    # One that is not there: taken out of the machine since the job was submitted.
    known = [*devices, "GPU-gone"]
    wanted = st.one_of(
        st.none(),
        st.integers(1, 7),
        st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True),
    )
    asked = draw(st.lists(st.tuples(wanted, st.booleans()), max_size=7))
    queue = [Request(100 + n, *one) for n, one in enumerate(asked)]
    some = st.dictionaries(st.sampled_from(known), st.integers(1, 9), max_size=4)
    return Case(
        queue=queue,
        claims=draw(some),
        devices=devices,
        on_cpu=draw(st.lists(st.integers(10, 19), max_size=3, unique=True)),
        slots=draw(st.integers(1, 3)),
        foreign=draw(st.dictionaries(st.sampled_from(known), st.just("someone"), max_size=2)),
    )


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_no_gpu_is_given_to_two_jobs(case: Case) -> None:
    taken = set(case.claims)
    for request, decision in zip(case.queue, case.decide(), strict=True):
        assert decision.job == request.job
        if not isinstance(decision, Start):
            assert decision.reason.startswith("waiting")
            continue
        assert not taken & set(decision.gpus)
        assert set(decision.gpus) <= set(case.devices)
        taken |= set(decision.gpus)
        if request.gpus is None:
            assert decision.gpus == ()
        elif isinstance(request.gpus, int):
            assert len(decision.gpus) == request.gpus
            assert list(decision.gpus) == sorted(decision.gpus, key=case.devices.index)
        else:
            assert decision.gpus == tuple(request.gpus)
        if not request.shares:
            assert not set(decision.gpus) & set(case.foreign), "somebody else's"


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_nobody_overtakes_a_job_for_what_it_waits_for(case: Case) -> None:
    """A GPU that an earlier waiting job could use is not given to a later one."""
    free = {uuid for uuid in case.devices if uuid not in case.claims}
    waited_for: set[str] = set()
    cpu_waits = False
    for request, decision in zip(case.queue, case.decide(), strict=True):
        if isinstance(decision, Start):
            assert not waited_for & set(decision.gpus)
            assert request.gpus is not None or not cpu_waits
            free -= set(decision.gpus)
        elif request.gpus is None:
            cpu_waits = True
        elif isinstance(request.gpus, int):
            waited_for |= free if request.shares else free - set(case.foreign)
        else:
            waited_for |= set(request.gpus)


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_what_can_start_does(case: Case) -> None:
    """A job waits only for something that is held, waited for by an earlier job, or not there."""
    held = set(case.claims)
    waited_for: set[str] = set()
    running_on_cpu = len(case.on_cpu)
    for request, decision in zip(case.queue, case.decide(), strict=True):
        taken = held | waited_for | (set() if request.shares else set(case.foreign))
        usable = [uuid for uuid in case.devices if uuid not in taken]
        if isinstance(decision, Start):
            held |= set(decision.gpus)
            running_on_cpu += request.gpus is None
        elif request.gpus is None:
            assert running_on_cpu >= case.slots
        elif isinstance(request.gpus, int):
            assert len(usable) < request.gpus
            waited_for |= set(usable)
        else:
            assert not set(request.gpus) <= set(usable)
            waited_for |= set(request.gpus)
    assert running_on_cpu <= max(case.slots, len(case.on_cpu))


@given(
    wanted=st.lists(
        st.tuples(
            st.one_of(st.integers(1, 5), st.lists(st.integers(0, 15), min_size=1, max_size=3)),
            st.booleans(),
        ),
        max_size=20,
    ),
    held=st.dictionaries(st.integers(0, 15), st.integers(1, 12), max_size=16),
    others=st.frozensets(st.integers(0, 15), max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_a_reason_is_of_the_moment_when_the_job_was_decided(
    wanted: list[tuple[int | list[int], bool]], held: dict[int, int], others: frozenset[int]
) -> None:
    """Also among many jobs that wait for the same: not what was so for an earlier one."""
    devices = [f"GPU-{n}" for n in range(16)]
    queue = [
        Request(100 + n, one if isinstance(one, int) else [devices[i] for i in one], shares)
        for n, (one, shares) in enumerate(wanted)
    ]
    claims = {devices[n]: job for n, job in held.items()}
    running: dict[int, list[int]] = {}
    for index, job in held.items():
        running.setdefault(job, []).append(index)
    waiting: dict[int, list[int]] = {}
    taken = set(held)
    decided = place(queue, claims, devices, foreign={devices[n]: "ann" for n in others})
    for (asked, shares), decision in zip(wanted, decided, strict=True):
        if isinstance(decision, Start):
            running[decision.job] = [devices.index(uuid) for uuid in decision.gpus]
            taken |= set(running[decision.job])
            continue
        wants = dict.fromkeys(asked) if isinstance(asked, list) else range(16)
        if isinstance(asked, int):
            named = [job for job, indices in waiting.items() if indices][:8]
            kept = "; ".join(f"{_gpus(waiting[job])} reserved for job {job}" for job in named)
            on = ", ".join(f"job {job} on {_gpus(running[job])}" for job in list(running)[:8])
            told = decision.reason.removesuffix(")").split("; ")
            assert told[-1] == on + ", …" * (len(running) > 8) or not running
            assert "; ".join(x.split(", which")[0] for x in told if "reserved" in x) == kept
            wants = [n for n in wants if shares or n not in others]
        waiting[decision.job] = [n for n in wants if n not in taken]
        taken |= set(waiting[decision.job])


def _gpus(indices: list[int]) -> str:
    return f"GPU{'s' * (len(set(indices)) != 1)} {units.ranges(indices)}"


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_the_same_question_gets_the_same_answer(case: Case) -> None:
    assert case.decide() == case.decide()


def test_the_first_in_the_queue_is_served_first() -> None:
    decisions = place([Request(1, 1), Request(2, 2), Request(3, 1)], {}, [A, B])
    assert decisions[0] == Start(1, (A,))
    assert decisions[1] == Wait(2, "waiting for 2 GPUs (1 available; job 1 on GPU 0)")
    assert isinstance(decisions[2], Wait), "the free GPU is kept for job 2"


def test_a_job_for_other_gpus_does_not_wait_behind_one_for_named_gpus() -> None:
    queue = [Request(2, [A, B]), Request(3, [C]), Request(4, 1), Request(5, [B])]
    decisions = place(queue, {A: 1}, [A, B, C, D])
    assert decisions == [
        Wait(2, "waiting for job 1 on GPU 0"),
        Start(3, (C,)),
        Start(4, (D,)),
        Wait(5, "waiting: GPU 1 reserved for job 2, which waits for GPU 0"),
    ]


def test_all_that_hold_a_named_gpu_are_told() -> None:
    (decision,) = place([Request(9, [A, B, C])], {A: 4, C: 2}, [A, B, C])
    assert decision == Wait(9, "waiting for jobs 2, 4 on GPUs 0,2")


def test_a_reserved_gpu_is_named_with_the_job_that_waits_for_it_and_why() -> None:
    devices = [f"GPU-{n}" for n in range(8)]
    first = [*devices[:4], devices[6]]
    queue = [Request(2, first), Request(3, 3), Request(4, 1), Request(5, [devices[3], devices[7]])]
    waits = place(queue, {devices[6]: 1, devices[7]: 1}, devices)
    reserved = "reserved for job 2, which waits for GPU 6"
    assert waits == [
        Wait(2, "waiting for job 1 on GPU 6"),
        Wait(3, f"waiting for 3 GPUs (2 available; GPUs 0-3 {reserved}; job 1 on GPUs 6,7)"),
        Wait(
            4,
            f"waiting for 1 GPU (0 available; GPUs 0-3 {reserved}; "
            "GPUs 4,5 reserved for job 3, which waits for 3 GPUs; job 1 on GPUs 6,7)",
        ),
        Wait(5, f"waiting for job 1 on GPU 7; GPU 3 {reserved}"),
    ]


def test_a_gpu_that_is_not_there_is_named() -> None:
    (decision,) = place([Request(1, ["GPU-x"])], {}, [A])
    assert decision == Wait(1, "waiting for GPU GPU-x, which this machine does not have")


def test_a_gpu_in_foreign_hands_is_only_for_a_job_that_shares() -> None:
    queue = [Request(1, 1), Request(2, [A]), Request(3, [A], shares=True)]
    first, second, third = place(queue, {}, [A, B], foreign={A: "ann's python"})
    assert first == Start(1, (B,))
    assert isinstance(second, Wait)
    assert "GPU 0 is used by ann's python" in second.reason
    assert isinstance(third, Wait), "job 2 is to have it first"
    assert place([Request(3, [A], shares=True)], {}, [A], foreign={A: "x"}) == [Start(3, (A,))]
    assert place([Request(3, 1, shares=True)], {}, [A], foreign={A: "x"}) == [Start(3, (A,))]


def test_who_uses_a_gpu_is_told_when_a_number_of_gpus_is_waited_for() -> None:
    (decision,) = place([Request(1, 2)], {}, [A, B], foreign={B: "ann's python"})
    assert isinstance(decision, Wait)
    assert decision.reason.startswith("waiting for 2 GPUs (1 available")
    assert "ann's python" in decision.reason


def test_one_job_at_a_time_on_the_cpu_unless_told_otherwise() -> None:
    queue = [Request(2, None), Request(3, None)]
    assert place(queue, {}, [], running_on_cpu=[1]) == [
        Wait(2, "waiting for job 1 to free the CPU"),
        Wait(3, "waiting for job 1 to free the CPU"),
    ]
    assert place(queue, {}, [], running_on_cpu=[1], cpu_slots=2) == [
        Start(2, ()),
        Wait(3, "waiting for jobs 1, 2 to free the CPU"),
    ]


def test_a_long_queue_on_many_gpus_is_decided_at_once() -> None:
    """10,000 jobs on 1,024 GPUs; quadratic work would take minutes."""
    devices = [f"GPU-{n}" for n in range(1024)]
    queue = [
        Request(n, [devices[n % 1024], devices[(n * 7 + 1) % 1024]] if n % 3 else 4)
        for n in range(1, 10_001)
    ]
    begun = time.process_time()
    decisions = place(queue, {devices[5]: 20_000}, devices)
    assert time.process_time() - begun < 1.0
    assert len(decisions) == 10_000


def test_cpu_jobs_and_gpu_jobs_do_not_wait_for_each_other() -> None:
    decisions = place([Request(2, 1), Request(3, None)], {A: 1}, [A])
    assert [type(d) for d in decisions] == [Wait, Start]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    big=st.integers(1, 8),
    stream=st.lists(st.integers(1, 3), min_size=8, max_size=8),
    by_name=st.booleans(),
)
def test_a_blocked_job_starts_once_those_before_it_have_ended(
    sizes: list[int], big: int, stream: list[int], by_name: bool
) -> None:
    """However many small jobs keep arriving behind it: it never starves."""
    devices = [f"GPU-{n}" for n in range(8)]
    claims: dict[str, int] = {}
    before = []
    for number, size in enumerate(sizes, start=1):
        (decision,) = place([Request(number, size)], claims, devices)
        if isinstance(decision, Start):
            claims |= dict.fromkeys(decision.gpus, number)
            before.append(number)
    wanted: int | list[str] = devices[:big] if by_name else big
    waiting = [Request(100, wanted)]
    for rounds, size in enumerate([*stream, *stream]):
        waiting.append(Request(200 + rounds, size))
        decisions = place(waiting, claims, devices)
        started = {d.job: d.gpus for d in decisions if isinstance(d, Start)}
        if 100 in started:
            return
        waiting = [request for request in waiting if request.job not in started]
        for job, gpus in started.items():
            claims |= dict.fromkeys(gpus, job)
        assert before, "all that ran before it has ended, and it still waits"
        ended = before.pop(0)  # of the later ones, none ends
        claims = {uuid: job for uuid, job in claims.items() if job != ended}
    raise AssertionError("never started")


def test_people_read_the_numbers_that_the_driver_shows_not_places_in_a_list() -> None:
    """A GPU may be left out, as one that is off the bus."""
    numbers = {A: 4, B: 7}
    queue = [Request(10, [A]), Request(11, [B])]
    foreign = {B: "ann"}
    decided = place(queue, {A: 1}, [A, B], [], 1, foreign, indices=numbers)
    assert decided == [
        Wait(10, "waiting for job 1 on GPU 4"),
        Wait(11, "waiting: GPU 7 is used by ann"),
    ]
    decided = place(queue, {A: 1}, [A, B], [], 1, foreign)
    assert [one.reason for one in decided if isinstance(one, Wait)] == [
        "waiting for job 1 on GPU 0",
        "waiting: GPU 1 is used by ann",
    ]
