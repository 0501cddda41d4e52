"""Names what an object store answered, or that it didn't, from the text of an error.

delta-rs, Arrow and Hadoop's file systems print the store's answer within their own message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from waldelta.errors import LakeError, StoreMissing, StoreRefused, StoreUnreachable

# How delta-rs lays out a chain of causes; and the part of an address that may be a signature.
_LAYOUT = re.compile(r"\x1b\[[0-9;]*m|↳")
_QUERY = re.compile(r"(https?://[^\s?]+)\?\S+")
# What a store repeats of the request that it refused: parts of the signature.
# delta-rs adds the row that violates a constraint.
_ROW = re.compile(r"(violated by value in row:).*", re.DOTALL)
_DETAILS = re.compile(r"<(StringToSign|CanonicalRequest)\w*>.*?</\1\w*>", re.DOTALL)
# In errors of delta-rs's object store. Others of the network are of something else.
_OF_STORE = re.compile(r"Generic \w+ error|Error performing|Kernel error")
_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """What a store's answer means: the error for it, and what to do."""

    words: re.Pattern[str]
    error: type[LakeError]
    remedy: str


_ANSWERS = (
    StoreAnswer(
        re.compile(
            r"AuthorizationHeaderMalformed|PermanentRedirect|IncorrectEndpoint"
            r"|Received redirect without LOCATION|\b301 Moved Permanently"
        ),
        StoreRefused,
        "set the region of target.root's bucket: AWS_REGION, or region_name in the connection",
    ),
    StoreAnswer(
        re.compile(
            r"\b40[13] (?:Forbidden|Unauthorized)|AccessDenied|Access Denied|lacked the necessary"
            r" privileges|valid authentication credentials"
            r"|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|AuthenticationFailed"
            r"|AuthorizationPermissionMismatch"
        ),
        StoreRefused,
        "check the credentials in the environment (AWS_…, AZURE_…, GOOGLE_…) and their"
        " permissions for target.root",
    ),
    StoreAnswer(
        re.compile(r"NoSuchBucket|ContainerNotFound|\b404 Not Found"),
        StoreMissing,
        "create the bucket or container, or correct target.root",
    ),
    StoreAnswer(
        re.compile(
            r"\b(?:429|5\d\d) [A-Z][a-z]+|SlowDown|dns error|error sending request|operation timed"
            r" out|connection closed"
            r"|Connection refused|Connection reset"
            # These are from Hadoop's file systems, and from Spark Connect.
            r"|Status Code:"
            r" 5\d\d|UnknownHostException|SocketTimeoutException|NoHttpResponseException"
            r"|\bUNAVAILABLE\b|ExecutorLostFailure",
        ),
        StoreUnreachable,
        "the store doesn't answer: check its address and the network, and run again",
    ),
)


def answer_in(text: str) -> StoreAnswer | None:
    """Return the store's answer that a message has in it; None without any."""
    return next((answer for answer in _ANSWERS if answer.words.search(text)), None)


def store_text(err: BaseException) -> str:
    """Return an error's message on one line, without signatures."""
    text = _ROW.sub(r"\1 …", _DETAILS.sub("", _LAYOUT.sub("", str(err))))
    return _QUERY.sub(r"\1?…", " ".join(text.split()))


def store_error(err: BaseException) -> LakeError | None:
    """Return the named error for a failed read by delta-rs or Arrow; None for any other error."""
    # Loaded only after an error: Airflow parses DAGs without delta-rs.
    from deltalake.exceptions import DeltaError

    text = store_text(err)
    if not (isinstance(err, DeltaError) or (isinstance(err, OSError) and _OF_STORE.search(text))):
        return None
    answer = answer_in(text)
    # A file that isn't there has the same number as a bucket that isn't there.
    if answer is None or (answer.error is StoreMissing and not _BUCKET.search(text)):
        return None
    return answer.error(f"the lake can't be read ({text}): {answer.remedy}")
