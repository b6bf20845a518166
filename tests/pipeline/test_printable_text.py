import pytest

from offstage.pipeline.plain_data import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x07", "\ufffd[2J\ufffd"),
        ("a\r\nb\rc", "a\nbc"),
        ("\u202eabc", "\ufffdabc"),
        ("naïve 数 👩\u200d👧", "naïve 数 👩\u200d👧"),
    ],
)
def test_a_terminal_finds_nothing_to_obey(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert "".join(map(printable, text)) == shown, "piece by piece too"
