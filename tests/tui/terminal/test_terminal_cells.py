"""What is left out of a picture is on the terminal already."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.tui.emulated_screen import EmulatedScreen
from tui.terminal.driver import TerminalCells, change_of_style, cursor_move

WIDTH, HEIGHT = SIZE = (40, 4)
STYLES = st.sampled_from(
    (
        "",
        "1",
        "2;3",
        "31",
        "38;2;1;2;3;48;2;4;5;6",
        "1;38;2;1;2;3;48;2;4;5;6",
        "38;5;9;48;2;4;5;6",
        "7;97;100",
        "38;2;9;9;9",
        "48;2;4;5;6",
        "4;1;91",
    )
)
LONG_BLANKS = st.integers(10, 16).map(lambda count: " " * count)
TEXTS = st.lists(st.text("ab ─漢é", max_size=9) | LONG_BLANKS, max_size=2).map("".join)
PIECES = st.tuples(
    st.integers(0, WIDTH - 1),
    st.integers(0, HEIGHT - 1),
    st.lists(st.tuples(TEXTS, STYLES), min_size=1, max_size=3),
)
PICTURES = st.lists(PIECES, max_size=5)


def at(x: int, y: int) -> str:
    return f"\x1b[{y + 1};{x + 1}H"


def run(text: str, style: str = "") -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if style else text


def drawn(picture: list[tuple[int, int, list[tuple[str, str]]]]) -> str:
    """As Textual draws pieces of lines."""
    lines = (at(x, y) + "".join(run(*part) for part in parts) for x, y, parts in picture)
    return "\n".join(lines) + at(0, 0)


@given(st.lists(PICTURES, max_size=6), st.integers(0, 6), st.booleans())
def test_the_terminal_shows_the_same_with_less(
    pictures: list[list[tuple[int, int, list[tuple[str, str]]]]], disturbed: int, erases: bool
) -> None:
    whole, less = EmulatedScreen(SIZE), EmulatedScreen(SIZE)
    cells = TerminalCells(erases=erases)
    for number, picture in enumerate(pictures):
        data = drawn(picture)
        if number == disturbed:
            whole.resize(SIZE)
            less.resize(SIZE)
            cells.forget()
        whole.feed(data)
        less.feed(cells.shorten(data, SIZE))
        assert less.cells == whole.cells
        assert (less.x, less.y) == (whole.x, whole.y)
        assert not less.style


@given(st.lists(PICTURES, max_size=3))
def test_a_picture_that_is_shown_already_costs_nothing(
    pictures: list[list[tuple[int, int, list[tuple[str, str]]]]],
) -> None:
    cells = TerminalCells()
    for picture in pictures:
        data = drawn(
            [
                (x, y, [(text.replace("漢", "k"), style) for text, style in parts])
                for x, y, parts in picture
                if x + sum(len(t) for t, _ in parts) <= WIDTH
            ]
        )
        cells.shorten(data, SIZE)
    last = at(0, 0) + run("abcdefghijkl", "31") + at(3, 3)
    cells.shorten(last, SIZE)
    assert cells.shorten(last, SIZE) == ""


@given(STYLES, STYLES)
def test_a_style_follows_another(before: str, after: str) -> None:
    screen, wanted = EmulatedScreen(SIZE), EmulatedScreen(SIZE)
    screen.feed(f"\x1b[{before}m{change_of_style(before, after)}" if before != after else "")
    wanted.feed(f"\x1b[{after}m")
    assert screen.style == wanted.style or before == after


def test_only_the_digit_that_changed_is_sent() -> None:
    cells = TerminalCells()
    cells.shorten(at(0, 1) + run("step 120/500", "38;2;1;2;3;48;2;4;5;6") + at(0, 0), SIZE)
    data = at(0, 1) + run("step 121/500", "38;2;1;2;3;48;2;4;5;6") + at(0, 0)
    assert cells.shorten(data, SIZE) == ("\x1b[38;2;1;2;3;48;2;4;5;6m\x1b[2;8H1\x1b[m\x1b[1;1H")


CELLS = st.tuples(st.integers(0, WIDTH - 1), st.integers(0, HEIGHT - 1))


@given(st.none() | CELLS, CELLS)
def test_the_cursor_arrives_in_few_bytes(
    start: tuple[int, int] | None, to: tuple[int, int]
) -> None:
    screen = EmulatedScreen(SIZE)
    if start is not None:
        screen.x, screen.y = start
    move = cursor_move(start, to)
    screen.feed(move)
    assert (screen.x, screen.y) == to
    assert len(move) <= len(at(*to))


def test_a_color_of_a_column_is_said_once() -> None:
    """A box's border takes 7 bytes a line, not a color each time."""
    border, cells = "38;2;1;2;3", TerminalCells()
    data = "\n".join(at(2, y) + run("│", border) + run("x", "1") for y in range(HEIGHT)) + at(0, 0)
    sent = cells.shorten(data, SIZE)
    assert sent.count(border) == 1
    assert "│\x1b[B\b│" in sent


def test_long_blanks_are_erased_where_that_keeps_the_background() -> None:
    style = "38;2;1;2;3;48;2;4;5;6"
    data = at(0, 0) + run(f"a{' ' * 20}b", style) + at(0, 0)
    assert "a\x1b[20X\x1b[20Cb" in TerminalCells(erases=True).shorten(data, SIZE)
    assert f"a{' ' * 20}b" in TerminalCells().shorten(data, SIZE)
    underlined = at(0, 0) + run(" " * 20, "4") + at(0, 0)
    assert " " * 20 in TerminalCells(erases=True).shorten(underlined, SIZE)


def test_a_colour_that_stays_is_not_said_again() -> None:
    assert change_of_style("1;38;2;1;1;1;48;2;9;9;9", "1;38;2;2;2;2;48;2;9;9;9") == (
        "\x1b[38;2;2;2;2m"
    )


def test_another_size_and_what_is_not_understood_are_sent_whole() -> None:
    cells = TerminalCells()
    picture = at(0, 0) + run("hello", "31") + at(0, 0)
    cells.shorten(picture, SIZE)
    for disturbance in ("\x1b[?1049h", "\x1b[2J", at(2, 2) + "\x1bPq#0~\x1b\\" + at(0, 0)):
        assert cells.shorten(disturbance, SIZE) == disturbance
        assert "hello" in cells.shorten(picture, SIZE)
        assert cells.shorten(picture, SIZE) == ""
    assert "hello" in cells.shorten(picture, (20, 4))


def test_titles_modes_and_the_clipboard_leave_the_cells() -> None:
    cells = TerminalCells()
    picture = at(0, 0) + "hello" + at(0, 0)
    cells.shorten(picture, SIZE)
    for harmless in ("\x1b[?25l", "\x1b]0;title\x07", "\x1b]52;c;YQ==\a", "\a", "\x1b[?2026$p"):
        assert cells.shorten(harmless, SIZE) == harmless
        assert cells.shorten(picture, SIZE) == ""


def test_a_line_longer_than_the_terminal_is_of_an_older_size() -> None:
    """Its last cell holds whatever the terminal made of the rest."""
    cells = TerminalCells()
    cells.shorten(at(0, 0) + "x" * (WIDTH + 5) + at(0, 0), SIZE)
    data = at(0, 0) + "x" * WIDTH + at(0, 0)
    assert cells.shorten(data, SIZE) == "x" * WIDTH + at(0, 0)
