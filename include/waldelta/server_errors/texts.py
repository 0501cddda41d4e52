"""Every text by which this project recognises an error: only those that come without a code.

PostgreSQL's errors have a SQLSTATE (waldelta.server_errors.sqlstate), Spark's a condition, and a
file system's a number. What reaches us as text alone is matched here and nowhere else. Each entry
names the version that printed it: look at it again when that version changes. A test refuses a
match of an error's text anywhere else.
"""

from __future__ import annotations

import errno
import os
import re

# --- libpq 18 (psycopg 3.3, ADBC 1.13): refusals by the client itself, before or without an answer
# of the server. libpq prints English unless the process has set a locale, which Python doesn't.
CERTIFICATE_FILE = re.compile(
    r'file "[^"]*" does not exist|but not private key file|could not (read|load|open)'
    r" .*(certificate|private key)"
)
NO_SSL = re.compile(r"server does not support SSL")
UNTRUSTED_CERTIFICATE = re.compile(r"certificate verify failed|server certificate for")
# OpenSSL 3, through libpq.
CLIENT_CERTIFICATE_REFUSED = re.compile(
    r"alert (certificate|unknown ca|bad certificate|unsupported certificate)"
)
INVALID_OPTION = re.compile(r"invalid \w+ value|invalid connection option")
NO_PASSWORD = re.compile(r"no password supplied")
# libpq puts the server's severity, in the server's language, and two spaces before its message.
SERVER_ANSWERED = re.compile(r":  \S")
# The SQLSTATE in libpq's trace of an ErrorResponse; severity and code come before any message.
TRACED_SQLSTATE = re.compile(r'\bErrorResponse\t S "[^"]*" V "[A-Z]+" C "([0-9A-Z]{5})"')

# --- PostgreSQL 15 to 18: names and numbers within a translated text.
# The output plugin, and the position of the change that it was decoding.
DECODED_POSITION = re.compile(
    r"pgoutput.*?(?<![0-9A-F])([0-9A-F]{1,8}/[0-9A-F]{1,8})(?![0-9A-F])", re.DOTALL
)
# English answers to a login that name a user or a database, after the password was accepted.
NOT_OF_PASSWORD = re.compile(r'too many connections for|permission denied|^FATAL:  database "')
# The bytes that have no equivalent in the client's encoding.
UNTRANSLATABLE_BYTES = re.compile(r"(?<!\w)0x([0-9a-f]{2})(?!\w)")

# --- delta-rs 1.6, pyarrow 26, Python: the operating system's number of an error.
OS_NUMBER = re.compile(r"(?:\bos error |\berrno |\bOs \{ code: )(\d+)", re.IGNORECASE)
# OpenJDK 17 prints the system's text without the number.
OS_TEXTS = {
    os.strerror(number): number
    for number in (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS,
        errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EMFILE, errno.ENFILE, errno.EIO,
        errno.ESTALE,
    )
}  # fmt: skip

# --- delta-rs 1.6 and obstore 0.12 (object_store), and Hadoop 3.4's file systems: an object store's
# answer, with its HTTP status, within a longer message.
# How delta-rs lays out a chain of causes; and the part of an address that may be a signature.
LAYOUT = re.compile(r"\x1b\[[0-9;]*m|↳")
ADDRESS_QUERY = re.compile(r"(https?://[^\s?]+)\?\S+")
# What a store repeats of the request that it refused: parts of the signature.
SIGNED_DETAILS = re.compile(r"<(StringToSign|CanonicalRequest)\w*>.*?</\1\w*>", re.DOTALL)
# In errors of delta-rs's object store. Others of the network are of something else.
OF_STORE = re.compile(r"Generic \w+ error|Error performing|Kernel error")
NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)

STORE_REGION = re.compile(
    r"AuthorizationHeaderMalformed|PermanentRedirect|IncorrectEndpoint"
    r"|Received redirect without LOCATION|\b301 Moved Permanently"
)

STORE_CREDENTIALS = re.compile(
    r"\b40[13] (?:Forbidden|Unauthorized)|AccessDenied|Access Denied|lacked the necessary"
    r" privileges|valid authentication credentials"
    r"|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|AuthenticationFailed"
    r"|AuthorizationPermissionMismatch"
)

STORE_MISSING = re.compile(r"NoSuchBucket|ContainerNotFound|\b404 Not Found")

STORE_UNANSWERED = re.compile(
    r"\b(?:429|5\d\d) [A-Z][a-z]+|SlowDown|dns error|error sending request|operation timed"
    r" out|connection closed"
    r"|Connection refused|Connection reset"
    # These are from Hadoop's file systems, and from Spark Connect.
    r"|Status Code:"
    r" 5\d\d|UnknownHostException|SocketTimeoutException|NoHttpResponseException"
    r"|\bUNAVAILABLE\b|ExecutorLostFailure",
)

# Spark 4.2, Hadoop 3.4 and Delta 4.4: a place that can't be written. Any other error may be
# temporary.
STORAGE_REFUSES = re.compile(
    r"Permission denied|AccessDenied|AccessControlException|Access Denied|Forbidden|Read-only file"
    r" system"
    r"|Mkdirs failed|ParentNotDirectory|Not a directory|not a"
    r" directory|FileAlreadyExistsException|No space left on device"
    r"|Disk quota exceeded|File too large|Input/output error|Stale file handle"
    r"|DELTA_CANNOT_CREATE_LOG_PATH|DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION|NoSuchBucket"
    r"|UnknownHostException"
)

# --- Spark 4.2 and Delta 4.4: conditions and classes of exceptions. Over Connect, and from tasks,
# only the text with them arrives.
TABLE_ABSENT = re.compile(
    r"DELTA_(TABLE_NOT_FOUND|PATH_DOES_NOT_EXIST|MISSING_DELTA_TABLE|PATH_NOT_FOUND)|PATH_NOT_FOUND"
)

# Java has a ConcurrentModificationException, too; that one is a defect, not a conflict.
CONFLICT = re.compile(
    r"DELTA_CONCURRENT_|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED"
    r"|Concurrent(?:Transaction|Append|Write|DeleteRead|DeleteDelete)Exception"
    r"|(?:Metadata|Protocol)ChangedException"
)


# Hadoop's and Spark's messages for missing files, which a VACUUM with a short retention may have
# deleted.
FILE_GONE = re.compile(
    r"FAILED_READ_FILE\.FILE_NOT_EXIST|FileNotFoundException|DELTA_FILE_NOT_FOUND"
)
# Conflicts that prove a change of the table itself: nothing was written based on the old state.
FENCED = re.compile(
    r"DELTA_CONCURRENT_TRANSACTION|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED"
    r"|ConcurrentTransactionException|(?:Metadata|Protocol)ChangedException"
)

# Python 3.11: a named error of ours in the text of a task's failure, as Python prints an exception:
# qualified class, colon, message. Errors of tasks have one line.
NAMED_ERROR = re.compile(r"waldelta\.errors\.(\w+): ([^\n]+)")

# Spark Connect 4.2: an operation that the server abandoned, a refused token, a closed session.
OPERATION_ABANDONED = re.compile(r"INVALID_HANDLE|OPERATION_CANCELED")
TOKEN_REFUSED = re.compile(r"UNAUTHENTICATED|authentication token")
SESSION_CLOSED = re.compile(r"SESSION_CLOSED")

# Delta's codes for a commit that a table's definition doesn't allow. Spark's tasks return them only
# within a text (seen with Delta 4.4 and Spark 4.2).
DEFINITION_REFUSED = re.compile(
    r"DELTA_(?:VIOLATE_CONSTRAINT_WITH_VALUES|NOT_NULL_CONSTRAINT_VIOLATED"
    r"|MISSING_NOT_NULL_COLUMN_VALUE|CANNOT_MODIFY_APPEND_ONLY)"
)
