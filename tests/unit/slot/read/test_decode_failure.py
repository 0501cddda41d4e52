"""Which errors mean that PostgreSQL can't decode, and how what precedes is found."""

import pytest

from waldelta.lsn import Lsn
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.read.decode_failure import Answer, Refusal, last_readable
from waldelta.slot.read.peek import peek_error

CONTEXT = 'slot "s", output plugin "pgoutput", in the change callback, associated LSN 16/B374D848'
AT = Lsn.parse("16/B374D848")
REFUSALS = {
    "a row filter": ("22012", "division by zero", CONTEXT, "division by zero"),
    "a filter's cast, without its value": ("22P02",
     'invalid input syntax for type integer: "secret"', CONTEXT, "a value is invalid"),
    "a byte": ("22P05", 'byte 0x81 in encoding "WIN1252"', CONTEXT,
     'byte 0x81 in encoding "WIN1252"'),
    "a row that is too large": ("XX000", "invalid memory alloc request size 1100000003", CONTEXT,
     "invalid memory alloc request size 1100000003"),
    "a message that is too large": ("54000", "out of memory", CONTEXT, "out of memory"),
    "another language": ("22012", "Division durch Null",
     "Ausgabe-Plugin »pgoutput«, LSN 16/B374D848", "Division durch Null"),
    "another language, without its value": (
        "22P02",
        "ungültige Eingabesyntax für Typ integer: »secret«",
        "Ausgabe-Plugin »pgoutput«, LSN 16/B374D848",
        "a value is invalid",
    ),
    "letters that stand beside the position": ("22012", "0 による除算が行われました",
     '出力プラグイン"pgoutput"、関連するLSN16/B374D848の', "0 による除算が行われました"),
}  # fmt: skip


@pytest.mark.parametrize(("sqlstate", "said", "context", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_counts(sqlstate, said, context, words):
    """Errors about a value or a defect, with the change's position."""
    assert Refusal.of(ServerError(sqlstate, said, context)) == Refusal(words, sqlstate, AT)


PASSING = [
    "57014", "57P01", "57P02", "57P03", "08006", "08P01", "53000", "53100", "53200", "53300",
    "53400", "55P03", "55006", "40001", "40P01", "25P03", "25P04", "28000", "42501", "42704",
    "58030", "58P01", None,
]  # fmt: skip


@pytest.mark.parametrize("sqlstate", PASSING)
def test_what_may_be_gone_the_next_time_doesnt(sqlstate):
    """Cancelled, disconnected, locked, out of room or rights, and no value at all."""
    assert Refusal.of(ServerError(sqlstate, "x", CONTEXT)) is None


def test_an_error_of_no_change_doesnt():
    """As of an option that the server doesn't know; a defect counts also where none is named."""
    assert (
        Refusal.of(
            ServerError(
                "22023", "unrecognized option", 'output plugin "pgoutput", in the startup callback'
            )
        )
        is None
    )
    assert Refusal.of(ServerError("XX001", "could not find chunk")).at is None


# Messages of each transaction in front of the refused one; negative: of discarded ones.
@pytest.mark.parametrize(
    "before", [(1,), (3, 1), (4, 4, 4, 100, 1), (1,) * 70, (5, 300, 7), (-1, 3), (-1, -1, -1)]
)
def test_all_in_front_of_it(before):
    """A call ends behind the transaction that reaches its number; few are refused."""
    refused = Refusal("x", "22012", AT)
    asked = []

    def ask(most):
        given = landing = 0
        asked.append(most)
        for messages in before:
            given, landing = given + abs(messages), landing + max(messages, 0)
            if given >= most:
                return Answer(given, landing, AT)
        return refused

    last, refusal = last_readable(ask, ask(1))
    expected = (sum(map(abs, before)), sum(number for number in before if number > 0))
    assert (last.messages, last.landing) == expected
    assert refusal == refused
    assert len(asked) <= 2 * last.messages.bit_length() + 2


def test_nothing_is_refused_any_more():
    """The call that asks for more than there is gets all."""
    expected = (Answer(12, 12, AT), None)
    assert last_readable(lambda _: Answer(12, 12, AT), Answer(2, 2, AT)) == expected
    expected = (Answer(0, 0, None), None)
    assert last_readable(lambda _: Answer(0, 0, None), Answer(0, 0, None)) == expected


def test_a_message_beyond_a_gigabyte_is_no_lack_of_room():
    """PostgreSQL's words are the same, but a smaller read helps only one of them."""
    kinds = [
        type(peek_error("s", ServerError(code, "out of memory", CONTEXT))).__name__
        for code in ("54000", "53200")
    ]
    assert kinds == ["SourceError", "PeekTooLarge"]
