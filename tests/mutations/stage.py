"""Stage: tasks write net changes, and the merge reads all of them."""

from tests.mutations.mutation import Mutation

_TASKS = "unit/changes/stage/test_stage.py"
_COMPLETE_ROWS = "unit/stages/apply/test_complete_rows.py"

MUTATIONS = (
    Mutation("changes/stage/stage.py", "return 1 if plan.volume.moves or plan.may_move else",
             "return 1 if plan.volume.moves else",
             "With REPLICA IDENTITY FULL, two tasks collapse parts of one row's changes.",
             (_TASKS,)),
    Mutation("changes/stage/net_files.py", "    if count != rows:", "    if count > rows:",
             "A staged file that lacks events passes for a whole one.", (_TASKS,)),
    Mutation("changes/stage/stage.py", "value_set=pa.array([ACTION_INSERT, ACTION_UPSERT])",
             "value_set=pa.array([ACTION_UPSERT])",
             "A new row at a freed key isn't completed with its large values.", (_TASKS,)),
    Mutation("changes/stage/stage.py", "yield first, min(first + most, end)",
             "yield first, min(first + most, end - 1)",
             "The last message of each relation is lost when a range is split.", (_TASKS,)),
    Mutation("lake/storage.py", 'not in ("", ".", "_")]', 'not in ("", ".")]',
             "Spark's marker file is read as net changes.",
             ("unit/changes/stage/test_net_files.py",)),
    Mutation("stages/apply/complete_rows.py", "if actions[n] in (ACTION_DELETE, ACTION_PURGE)}",
             "if actions[n] in (ACTION_DELETE,)}",
             "A quarantined row stays in quarantine after its key was left empty.",
             (_COMPLETE_ROWS,)),
    Mutation("stages/apply/complete_rows.py", "left = [action in FRESH or bool(moves[n])",
             "left = [action in FRESH",
             "A quarantined row stays in quarantine after another row moved to its key.",
             (_COMPLETE_ROWS,)),
)  # fmt: skip
