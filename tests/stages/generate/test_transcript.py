import pytest

from offstage.stages.generate.transcript import transcript

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("prompt", "is_chat", "text", "shown"),
    [
        ("Once", False, " upon", "Once upon"),
        ("Hi", True, "Hello", "user: Hi\nassistant: Hello"),
        (CHAT, False, "Hello", "system: Be brief.\nuser: Hi\nassistant: Hello"),
        ([5, 6], True, "abc", "[5, 6] → abc"),
        ([5, 6], False, None, "[5, 6] → [7, 8]"),
    ],
)
def test_a_transcript_has_what_was_asked_before_the_answer(
    prompt: object, is_chat: bool, text: str | None, shown: str
) -> None:
    output = {"prompt": prompt, "text": text, "token_ids": [7, 8]}
    assert transcript(output, is_chat=is_chat) == shown
