"""Row filters: which rows a target has, and what an UPDATE across a filter becomes."""

from tests.mutations.mutation import Mutation

_DECODE = "unit/changes/decode/test_decode.py"
_TRANSLATE = "unit/row_filter/spark/test_translate.py"
_SOURCES = "unit/pipeline/targets/test_target_sources.py"
_REPAIR = "unit/pipeline/drift/test_repair_plan.py"
_PAGE = "integration/row_filter/test_row_filters_page.py::test_updates"
_WHERE = "integration/apply/test_target_where.py::test_it_holds_the_rows_that_match"
_CATALOG = "integration/setup/test_catalog.py::test_filters_are_ored_whatever_is_published"

MUTATIONS = (
    Mutation(
        "changes/decode/route.py",
        "then case when {OLD_ROW} = {SENT} and not {old} then {INSERT} else",
        "then case when {OLD_ROW} = {SENT} and {old} then {INSERT} else",
        "An UPDATE of a row in the target is an INSERT, and of a row that enters it an UPDATE.",
        (_PAGE,),
    ),
    Mutation("changes/decode/route.py", "or ({OLD_ROW} = {SENT} and {old}) then {DELETE} end end",
             "or ({OLD_ROW} = {SENT} and not {old}) then {DELETE} end end",
             "A row that leaves the filter stays in the target.", (_PAGE,)),
    Mutation("changes/decode/route.py", 'coalesce({routing.new}, false))"',
             'coalesce({routing.new}, true))"', "A filter that is NULL for a row includes it.",
             (_WHERE,)),
    Mutation("changes/decode/route.py", "kinds = ordered.take(pa.array(places))", "kinds = ordered",
             "Events that tasks return unordered get the operation of other events.",
             ("unit/changes/decode/test_route.py",)),
    Mutation("changes/decode/decode.py", "np.where(rows.op == DELETE, UNKNOWN, SAME)",
             "np.full(len(rows), SAME)", "A DELETE is judged by values that it doesn't have.",
             (_DECODE,)),
    Mutation("changes/decode/decode.py", '(("n", _new_key(rows, at)), ("p", old))',
             '(("p", _new_key(rows, at)), ("n", old))',
             "A filter judges the old row as the new one.", (_DECODE,)),
    Mutation("changes/decode/decode.py", 'relation.replica_identity == "f" or all(',
             'relation.replica_identity == "f" or any(',
             "An UPDATE is judged by NULL where the old row lacks a filter's column.", (_DECODE,)),
    Mutation("changes/decode/decode.py", "pa.array(rows.unchanged[at] & ~whole)",
             "pa.array(rows.unchanged[at])",
             "A row that enters a target lacks its unchanged TOASTed values.", (_DECODE,)),
    Mutation("row_filter/resolve.py", "is_unordered = collation not in _ORDERED",
             "is_unordered = collation is None",
             "Spark orders texts otherwise than the column's collation.", (_TRANSLATE,)),
    Mutation("row_filter/resolve.py", '"not" if node.negated else ""',
             '"" if node.negated else "not"', "IS NULL and IS NOT NULL are swapped.",
             (_TRANSLATE,)),
    Mutation("row_filter/spark/translate.py", 'both = f"({left.is_null} and {right.is_null})"',
             'both = f"({left.is_null} or {right.is_null})"',
             "NULL IS DISTINCT FROM a value is false.", (_TRANSLATE,)),
    Mutation("row_filter/spark/translate.py", '(("any", "="), ("all", "<>"))',
             '(("any", "="), ("any", "<>"))', "<> ANY is translated as IN.", (_TRANSLATE,)),
    Mutation(
        "row_filter/spark/values.py",
        'left, right = (replace(side, value=f"rtrim({side.value})") for side in (left, right))',
        "left, right = (replace(side) for side in (left, right))",
        "Trailing blanks of character(n) count in comparisons.",
        (_TRANSLATE,),
    ),
    Mutation("row_filter/resolve.py", "sum(digits) > MAX_PRECISION",
             "max(digits) > MAX_PRECISION",
             "Spark rounds a constant of more than 38 digits.", (_TRANSLATE,)),
    Mutation("pipeline/targets/target_sources.py", 'return f"({constraint}) and ({where}\\n)"',
             'return f"({constraint}) or ({where}\\n)"',
             "A target of one partition has filtered rows of other partitions.", (_SOURCES,)),
    Mutation("postgres/published_tables.py", '" OR ".join(f"({text})" for text in filters)',
             '" AND ".join(f"({text})" for text in filters)',
             "A copy lacks rows that only one of two publications publishes.", (_CATALOG,)),
    Mutation("postgres/published_tables.py", "return None if None in filters else",
             "return None if not filters else",
             "A copy lacks rows of a table that another publication publishes without a filter.",
             (_CATALOG,)),
)  # fmt: skip
