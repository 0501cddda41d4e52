"""Names what an object store answered, or that it didn't, from the text of an error.

delta-rs, Arrow and Hadoop's file systems print the store's answer within their own message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from waldelta.errors import (
    VIOLATING_ROW,
    LakeError,
    StoreMissing,
    StoreRefused,
    StoreUnreachable,
)
from waldelta.server_errors import texts


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """What a store's answer means: the error for it, and what to do."""

    words: re.Pattern[str]
    error: type[LakeError]
    remedy: str


_ANSWERS = (
    StoreAnswer(
        texts.STORE_REGION,
        StoreRefused,
        "set the region of target.root's bucket: AWS_REGION, or region_name in the connection",
    ),
    StoreAnswer(
        texts.STORE_CREDENTIALS,
        StoreRefused,
        "check the credentials in the environment (AWS_…, AZURE_…, GOOGLE_…) and their"
        " permissions for target.root",
    ),
    StoreAnswer(
        texts.STORE_MISSING,
        StoreMissing,
        "create the bucket or container, or correct target.root",
    ),
    StoreAnswer(
        texts.STORE_UNANSWERED,
        StoreUnreachable,
        "the store doesn't answer: check its address and the network, and run again",
    ),
)


def answer_in(text: str) -> StoreAnswer | None:
    """Return the store's answer that a message has in it; None without any."""
    return next((answer for answer in _ANSWERS if answer.words.search(text)), None)


def store_text(err: BaseException) -> str:
    """Return an error's message on one line, without signatures."""
    text = texts.SIGNED_DETAILS.sub("", texts.LAYOUT.sub("", str(err)))
    text = VIOLATING_ROW.sub(r"\1 …", text)
    return texts.ADDRESS_QUERY.sub(r"\1?…", " ".join(text.split()))


def store_error(err: BaseException) -> LakeError | None:
    """Return the named error for a failed read by delta-rs or Arrow; None for any other error."""
    # Loaded only after an error: Airflow parses DAGs without delta-rs.
    from deltalake.exceptions import DeltaError

    text = store_text(err)
    if not (
        isinstance(err, DeltaError) or (isinstance(err, OSError) and texts.OF_STORE.search(text))
    ):
        return None
    answer = answer_in(text)
    # A file that isn't there has the same number as a bucket that isn't there.
    if answer is None or (answer.error is StoreMissing and not texts.NO_BUCKET.search(text)):
        return None
    return answer.error(f"the lake can't be read ({text}): {answer.remedy}")
