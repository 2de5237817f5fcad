"""Random answers for tests of what formats them."""

from hypothesis import strategies as st

from srt.serve.generation.answers import (
    AnswerDelta,
    AnswerEnd,
    AnswerEvent,
    FinishReason,
    ToolCallDelta,
    Usage,
)

_ENDS: list[tuple[FinishReason, int | str | None]] = [
    ("stop", None),
    ("stop", 2),
    ("stop", "END"),
    ("length", None),
    ("tool_calls", 2),
]
TEXTS = st.text(st.characters(codec="utf-8"), max_size=4)


@st.composite
def answer_events(draw: st.DrawFn) -> list[AnswerEvent]:
    """Deltas in any order, empty ones too; calls one after another, as parsers write them."""
    events: list[AnswerEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from("rctbe"), max_size=12)):
        if kind == "r":
            events.append(AnswerDelta(reasoning=draw(TEXTS)))
        elif kind == "c":
            events.append(AnswerDelta(content=draw(TEXTS)))
        elif kind == "b":
            events.append(AnswerDelta(draw(TEXTS), draw(TEXTS)))
        elif kind == "e":
            events.append(AnswerDelta(token_ids=(1,)))
        else:
            parts = draw(st.sampled_from(["{}", '{"a": 1}', '{"a": "x', "", "no", "[1]"]))
            cut = draw(st.integers(0, len(parts)))
            begin = ToolCallDelta(calls, parts[:cut], id=f"call_{calls}", name="f")
            rest = ToolCallDelta(calls, parts[cut:])
            if draw(st.booleans()):
                events += [AnswerDelta(tool_calls=(begin,)), AnswerDelta(tool_calls=(rest,))]
            else:
                events.append(AnswerDelta(draw(TEXTS), tool_calls=(begin, rest)))
            calls += 1
    reason, stop = draw(st.sampled_from(_ENDS))
    return [*events, AnswerEnd(reason, stop, Usage(20, 5, 9, 3))]
