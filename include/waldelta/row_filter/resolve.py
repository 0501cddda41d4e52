"""Gives every part of an analysed filter its type and its row in the table of signatures, or
refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from waldelta.errors import FilterNotTranslatable
from waldelta.row_filter._patterns import PatternRefused, java_regex, like_parts, similar_to_regex
from waldelta.row_filter._signatures import (
    CASTS,
    COMPARISONS,
    FUNCTION_NAMES,
    INTEGER_DIGITS,
    SIGNATURES,
    Signature,
    TooManyDigits,
    common_digits,
    with_digits,
)
from waldelta.row_filter.analyzed_filter import Collation, RowFilter
from waldelta.row_filter.parse import (
    ArrayExpression,
    Call,
    Case,
    Cast,
    Collate,
    Column,
    Literal,
    Node,
    Quantified,
    Test,
    parse_analysed,
    place,
)
from waldelta.row_filter.typed_tree import (
    BOOL,
    FLOATS,
    FORMS,
    INTEGERS,
    NUMERIC,
    SHORT_NAMES,
    TEXT,
    TEXTS,
    Type,
    Typed,
    array_elements,
    interval_parts,
    numeric_digits,
)
from waldelta.types.numeric import MAX_PRECISION

_LARGEST_INT4 = (1 << 31) - 1
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_LOGIC = {"AND": "and", "OR": "or", "NOT": "not"}
ESCAPES = {"like_escape": "like", "similar_to_escape": "similar", "similar_escape": "similar"}
_ORDERED = frozenset({Collation.CODE_POINT, Collation.BINARY_ORDER})
# COLLATE with these is certain in a UTF-8 database.
NAMED_COLLATIONS = {
    "C": Collation.CODE_POINT, "POSIX": Collation.CODE_POINT, "ucs_basic": Collation.BINARY_ORDER,
    "pg_c_utf8": Collation.BINARY_ORDER,
}  # fmt: skip
# An infinite date has no value (NULL) for the periodic fields, and an infinite one for the
# monotonic ones.
PERIODIC = frozenset(
    {"month", "day", "hour", "minute", "second", "dow", "isodow", "doy", "quarter", "week"}
)
_MONOTONIC = frozenset({"year", "isoyear", "epoch"})
_TIMES = frozenset({"hour", "minute", "second"})
_UNITS = frozenset({"year", "quarter", "month", "week", "day", "hour", "minute", "second"})


_ARE_TEXTS = frozenset({"text", "varchar"})


def resolve(row_filter: RowFilter, columns: Mapping[str, Type]) -> Typed:
    """Returns the typed filter.

    Raises FilterNotTranslatable with the position of a part that has no certain translation.
    """
    resolver = _Resolver(row_filter, columns)
    node = parse_analysed(row_filter.analysed, resolver.enums)
    typed = resolver.node(node)
    resolver.need_boolean(node, typed)
    return typed


class _Resolver:
    def __init__(self, row_filter: RowFilter, columns: Mapping[str, Type]) -> None:
        self.filter, self.columns = row_filter, columns
        self.enums = {enum.name: enum for enum in row_filter.enums.values()}

    def refused(self, node: Node | Typed, reason: str) -> FilterNotTranslatable:
        """Returns the error for a part that has no certain translation, with its position."""
        return FilterNotTranslatable(
            self.filter.analysed, place(self.filter.analysed, node.start), reason
        )

    def refuse_if(self, is_refused: object, node: Node | Typed, reason: str) -> None:
        if is_refused:
            raise self.refused(node, reason)

    def node(self, node: Node) -> Typed:
        """Returns the typed form of any node."""
        return _BY_SYNTAX[type(node)](self, node)

    def column(self, node: Column) -> Typed:
        """Returns a column of the target, with what is certain about its collation."""
        if (column := self.columns.get(node.name)) is None:
            raise self.refused(node, f"column {node.name!r} isn't in the target")
        if column.name == "opaque" and (enum := self.filter.enums.get(node.name)) is not None:
            column = Type("enum", printed=enum.name)
        typed = Typed("column", column, value=node.name, start=node.start)
        if TEXTS.isdisjoint((column.name, column.element)):
            return typed
        collation = self.filter.collations.get(node.name, Collation.DETERMINISTIC)
        return replace(typed, collation=collation, strength=1)

    def literal(self, node: Literal) -> Typed:
        """Returns a constant that is printed without a cast."""
        if node.kind in ("true", "false"):
            return Typed("constant", BOOL, value=node.kind, start=node.start)
        if node.kind == "number":
            is_int4 = node.text.isdigit() and int(node.text) <= _LARGEST_INT4
            return self.constant(node, Type("int4") if is_int4 else NUMERIC, node.text)
        # Only the field of EXTRACT has no cast.
        return self.constant(node, TEXT, None if node.kind == "null" else node.text)

    def with_default(self, typed: Typed) -> Typed:
        """Returns the node with the database's collation, if it is a text."""
        is_text = typed.type.name in TEXTS
        return replace(typed, collation=self.filter.default_collation) if is_text else typed

    def constant(self, node: Node, kind: Type, text: str | None) -> Typed:
        """Returns a constant of a type, after a check of its text."""
        if text is None:
            if kind.name == "numeric":
                kind = replace(kind, digits=kind.digits or (1, 0))
            return self.with_default(Typed("constant", kind, start=node.start))
        form = FORMS.get(kind.name)
        self.refuse_if(
            form is not None and not form.fullmatch(text),
            node,
            f"a constant of type {kind} in an unusual form",
        )
        if kind.name == "numeric":
            digits = (1, 0) if text[-1].isalpha() else numeric_digits(text)
            self.refuse_if(
                sum(digits) > MAX_PRECISION, node, f"a number of more than {MAX_PRECISION} digits"
            )
            kind = replace(kind, digits=digits)
        self.refuse_if(
            kind.name == "interval" and interval_parts(text) is None,
            node,
            "an interval in an unusual form, or a very long one",
        )
        return self.with_default(Typed("constant", kind, value=text, start=node.start))

    def cast(self, node: Cast) -> Typed:
        """Returns a cast, or a constant: PostgreSQL prints most constants as casts of strings."""
        name = node.type.name
        self.refuse_if(name not in SHORT_NAMES.keys() | self.enums, node, f"a cast to {name}")
        # Of an array, the type of its elements.
        target = Type("enum", printed=name) if name in self.enums else Type(SHORT_NAMES[name])
        if isinstance(node.operand, Literal) and node.operand.kind in ("string", "null"):
            text = None if node.operand.kind == "null" else node.operand.text
            if node.type.is_array:
                return self.array_constant(node, target, text)
            return self.modified(node, self.constant(node, target, text))
        operand = self.node(node.operand)
        if node.type.is_array:
            return self.array_cast(node, operand, target)
        if operand.is_null:
            return self.constant(node, target, None)
        return self.modified(node, self.scalar_cast(node, operand, target))

    def scalar_cast(self, node: Cast, operand: Typed, target: Type) -> Typed:
        """Returns a cast by its row in the table, without the type's modifiers."""
        source, text = operand.type.name, operand.value or ""
        is_number = source in (*INTEGERS, "numeric") and text[-1:].isdigit()
        # The cast of a constant is a constant, where that is simple.
        if operand.is_constant and (
            (is_number and target.name in ("numeric", *FLOATS))
            or {source, target.name} <= _ARE_TEXTS
        ):
            return self.constant(node, target, text)
        if source == target.name:
            return operand
        if (key := CASTS.get((source, target.name))) is None:
            raise self.refused(node, f"a cast of {operand.type} to {target}")
        if target.name == "numeric":
            target = replace(target, digits=INTEGER_DIGITS[source])
        self.refuse_if(
            key == "text_to_bpchar" and not node.type.modifiers and node.type.name == "character",
            node,
            "a cast to character without a length",
        )
        cast = Typed(key, target, (operand,), None, node.start, operand.collation, operand.strength)
        return self.with_default(cast) if source == "enum" else cast

    def modified(self, node: Cast, typed: Typed) -> Typed:
        """Apply a type modifier: numeric(5,2), varchar(3), char(3)."""
        modifiers = node.type.modifiers
        if not modifiers or typed.is_null:
            return typed
        if typed.type.name in ("varchar", "bpchar"):
            return replace(
                typed, key=f"{typed.type.name}_limit", arguments=(typed,), value=str(modifiers[0])
            )
        if typed.type.name == "numeric":
            precision, scale = (*modifiers, 0)[:2]
            self.refuse_if(
                precision > MAX_PRECISION or scale > precision,
                node,
                f"a numeric of more than {MAX_PRECISION} digits",
            )
            kind = replace(NUMERIC, digits=(precision - scale, scale))
            return Typed("numeric_limit", kind, (typed,), None, node.start)
        # The value of a constant has the modifier already.
        self.refuse_if(not typed.is_constant, node, f"a cast to {node.type.name} with a precision")
        return typed

    def array_constant(self, node: Cast, element: Type, text: str | None) -> Typed:
        """``'{…}'::type[]``."""
        if text is None:
            return Typed("constant", Type("array", element=element.name), start=node.start)
        if (texts := array_elements(text)) is None:
            raise self.refused(
                node, "an array with more than one dimension, or whose index doesn't start at 1"
            )
        elements = [self.constant(node, element, each) for each in texts]
        return self.array(node, elements, element.name)

    def array(self, node: Node, elements: list[Typed], element: str | None = None) -> Typed:
        """Returns ``ARRAY[…]`` of typed elements, all of one type."""
        names = {each.type.name for each in elements} | ({element} if element else set())
        self.refuse_if(len(names) != 1, node, "an array of mixed types")
        collation, strength = self.merged(node, elements)
        kind = Type("array", element=names.pop())
        return Typed("array", kind, tuple(elements), None, node.start, collation, strength)

    def array_cast(self, node: Cast, operand: Typed, element: Type) -> Typed:
        """Returns a cast of a whole array, applied to its elements."""
        if operand.key == "array":
            casts = [self.element_cast(node, each, element) for each in operand.arguments]
            return self.array(node, casts, element.name)
        are_texts = {operand.type.element, element.name} <= _ARE_TEXTS and not node.type.modifiers
        self.refuse_if(not are_texts, node, f"a cast of {operand.type} to {element}[]")
        return replace(operand, type=Type("array", element=element.name))

    def element_cast(self, node: Cast, element: Typed, kind: Type) -> Typed:
        """Returns a cast of an array, for one of its elements."""
        if element.is_null:
            return self.constant(node, kind, None)
        if {element.type.name, kind.name} <= _ARE_TEXTS:
            return replace(element, type=kind)
        self.refuse_if(element.type.name != kind.name, node, f"a cast of an array to {kind}[]")
        return element

    def merged(self, node: Node, operands: list[Typed]) -> tuple[Collation | None, int]:
        """Returns the collation of a call: an explicit one, else the columns', else the
        database's.
        """
        texts = [o for o in operands if o.collation is not None]
        strength = max((o.strength for o in texts), default=0)
        collations = {o.collation for o in texts if o.strength == strength}
        # Two columns may have collations of two languages; PostgreSQL raises an error only when it
        # evaluates a row.
        self.refuse_if(len(collations) > 1, node, "texts of different collations")
        return next(iter(collations), None), strength

    def test(self, node: Test) -> Typed:
        operand = self.node(node.operand)
        key = "is_null" if node.what in ("NULL", "UNKNOWN") else f"is_{node.what.lower()}"
        if node.what != "NULL":
            self.need_boolean(node, operand)
        return Typed(key, BOOL, (operand,), "not" if node.negated else "", node.start)

    def need_boolean(self, node: Node, *typed: Typed) -> None:
        for each in typed:
            self.refuse_if(
                each.type.name != "bool", node, f"a {each.type}, where a boolean is wanted"
            )

    def collate(self, node: Collate) -> Typed:
        operand = self.node(node.operand)
        collation = NAMED_COLLATIONS.get(node.collation)
        if collation is None or not self.filter.is_utf8:
            raise self.refused(
                node, f"the collation {node.collation}, which Spark can't reproduce exactly"
            )
        return replace(operand, collation=collation, strength=2)

    def call(self, node: Call) -> Typed:
        if node.name in ("COALESCE", "GREATEST", "LEAST", "NULLIF"):
            return self.lazy(node)
        arguments = [self.node(argument) for argument in node.arguments]
        if node.name in _LOGIC:
            self.need_boolean(node, *arguments)
            return Typed(_LOGIC[node.name], BOOL, tuple(arguments), None, node.start)
        if node.name == "IS DISTINCT FROM":
            compared = self.found(node, "=", arguments)
            if compared.is_null:  # One side is the constant NULL.
                operand = arguments[0] if arguments[1].is_null else arguments[1]
                return Typed("is_null", BOOL, (operand,), "not", node.start)
            return replace(compared, key="is_distinct", type=BOOL)
        if node.name in ESCAPES:
            return self.escaped(node, arguments)
        return self.found(node, node.name, arguments)

    def found(self, node: Node, name: str, arguments: list[Typed]) -> Typed:
        names = tuple("array" if a.type.element else a.type.name for a in arguments)
        if (signature := SIGNATURES.get((name, names))) is None:
            # A varchar is a text wherever PostgreSQL prints no cast.
            names = tuple("text" if n == "varchar" else n for n in names)
            signature = SIGNATURES.get((name, names))
        if signature is None and names == ("enum", "enum") and name in _MIRRORED:
            return self.compared_by_label(node, name, *arguments)
        if signature is None:
            kinds = f" of {', '.join(str(a.type) for a in arguments)}"
            what = kinds if name in FUNCTION_NAMES else ", which isn't among the functions"
            raise self.refused(node, f"{name}{what} that can be translated")
        collation, strength = self.merged(node, arguments)
        self.demands(node, signature, arguments, collation)
        typed = Typed(signature.key, Type(signature.result), tuple(arguments), None, node.start)
        if signature.result == "text":
            typed = replace(
                typed, collation=collation or self.filter.default_collation, strength=strength
            )
        return self.special(node, typed, collation)

    def compared_by_label(self, node: Node, name: str, first: Typed, second: Typed) -> Typed:
        """Returns whether a label is before or after a constant one, as equality with those that
        are.
        """
        if first.is_constant:
            name, first, second = _MIRRORED[name], second, first
        if second.is_null:
            return self.constant(node, BOOL, None)
        labels = self.enums[first.type.printed].labels
        if not second.is_constant or second.value not in labels:
            raise self.refused(
                node,
                f"the order of the labels of {first.type}, which is known only for constants in"
                " constraints (compare with = or IN)",
            )
        at = labels.index(second.value)
        matches = {
            "<": labels[:at],
            "<=": labels[: at + 1],
            ">": labels[at + 1 :],
            ">=": labels[at:],
        }
        constants = [replace(second, value=label) for label in matches[name]]
        if not constants:  # False, or null where the value is.
            return self.found(node, "<>", [first, first])
        compared = (self.found(node, "=", [first, constant]) for constant in constants)
        return Typed("any", BOOL, (first, *compared), "=", node.start)

    def demands(
        self, node: Node, signature: Signature, arguments: list[Typed], collation: Collation | None
    ) -> None:
        is_unordered = collation not in _ORDERED
        is_case_unsure = collation is not Collation.CODE_POINT
        if_meant = 'on the collation (add COLLATE "C" if that is meant)'
        for lacks, reason in (
            (
                collation is Collation.NONDETERMINISTIC,
                "a text of a nondeterministic collation",
            ),
            (
                "o" in signature.flags and is_unordered,
                f"the order of texts, which depends {if_meant}",
            ),
            (
                "c" in signature.flags and is_case_unsure,
                f"upper and lower case, which depend {if_meant}",
            ),
            (
                "u" in signature.flags and not self.filter.is_utf8,
                "bytes of a text, which depend on the server's encoding",
            ),
        ):
            self.refuse_if(lacks, node, reason)
        # The first argument that must be a constant.
        first = next((int(flag[1:]) for flag in signature.flags if flag[0] == "k"), None)
        if first is not None and not all(
            a.is_constant or a.key == "pattern" for a in arguments[first:]
        ):
            raise self.refused(
                arguments[first],
                "something that changes from row to row, where only a constant is translated",
            )

    def special(self, node: Node, typed: Typed, collation: Collation | None) -> Typed:
        """Handle what a signature's row can't express: digits, patterns, fields of dates, array
        elements.
        """
        if any(a.is_null for a in typed.arguments):
            # Strict: PostgreSQL folds such a call into NULL without looking at its other arguments.
            return self.constant(node, typed.type, None)
        if typed.key in _PATTERN_KEYS:
            return self.pattern(node, typed, collation)
        elements = [a.type.element for a in typed.arguments if a.type.element]
        if len(elements) == 2:
            one, two = ({"varchar": "text"}.get(element, element) for element in elements)
            self.refuse_if(
                one != two or one not in (*INTEGERS, "text", "bool", "uuid"),
                node,
                f"arrays of {one} and {two}",
            )
        if reason := _moment_refusal(typed):
            raise self.refused(node, reason)
        if typed.type.name == "numeric" or typed.arguments[0].type.name == "numeric":
            try:
                return with_digits(typed)
            except TooManyDigits as err:
                raise self.refused(node, str(err)) from None
        self.refuse_if(
            typed.key == "array_length" and typed.arguments[1].value != "1",
            node,
            "array_length of another dimension than the first",
        )
        return typed

    def escaped(self, node: Call, arguments: list[Typed]) -> Typed:
        """Returns the pattern of like_escape() or similar_to_escape() of constants."""
        self.refuse_if(
            any(not a.is_constant or a.is_null for a in arguments),
            node,
            "a pattern that isn't a constant",
        )
        _, escape, *_ = *(a.value or "" for a in arguments), "\\"
        self.refuse_if(len(escape) > 1, node, "an escape of more than one character")
        pattern = replace(arguments[0], key="pattern", strength=0)
        return replace(pattern, arguments=(replace(pattern, key=ESCAPES[node.name], value=escape),))

    def pattern(self, node: Node, typed: Typed, collation: Collation | None) -> Typed:
        subject, pattern = typed.arguments
        text, escape = pattern.value or "", pattern.arguments[0] if pattern.arguments else None
        is_like = typed.key.endswith("like")
        self.refuse_if(
            escape is not None and is_like != (escape.key == "like"),
            node,
            "an escape of LIKE in SIMILAR TO, or the reverse",
        )
        try:
            if is_like:
                mark = escape.value or "" if escape else "\\"
                like_parts(text, mark)
                value = (  # The Spark SQL reads this form: any character may be the escape mark.
                    f"{len(mark)}{mark}{text}"
                )
            else:
                regex = similar_to_regex(text, escape.value or "") if escape else text
                value = java_regex(regex, certain_case=collation is Collation.CODE_POINT)
        except PatternRefused as err:
            raise self.refused(node, f"a pattern with {err}") from None
        return replace(typed, arguments=(subject,), value=value)

    def lazy(self, node: Call) -> Typed:
        arguments = [self.node(argument) for argument in node.arguments]
        if node.name == "NULLIF":
            compared = self.found(node, "=", arguments)
            if compared.is_null:
                return arguments[0]
            return replace(
                arguments[0],
                key="nullif",
                arguments=compared.arguments,
                value=None,
                start=node.start,
            )
        if node.name != "COALESCE":
            kind = arguments[0].type
            self.refuse_if(kind.name == "enum", node, f"{node.name} of {kind}")
            self.found(node, "<", arguments[:2])  # The arguments need an order.
        return self.alike(node, node.name.lower(), arguments, arguments)

    def alike(self, node: Node, key: str, results: list[Typed], arguments: list[Typed]) -> Typed:
        """Returns an expression whose results, all of one type, determine its type."""
        types = [result.type for result in results]
        self.refuse_if(
            len({t.name for t in types}) != 1
            or any(t.element or t.name == "opaque" for t in types),
            node,
            f"results of types {', '.join(sorted(map(str, types)))}",
        )
        kind = types[0] if types[0].name == "enum" else Type(types[0].name)
        if kind.name == "numeric":
            both = common_digits(types)
            self.refuse_if(
                sum(both) > MAX_PRECISION,
                node,
                f"numbers that need more than {MAX_PRECISION} digits together",
            )
            kind = replace(NUMERIC, digits=both)
        collation, strength = self.merged(node, results)
        return Typed(key, kind, tuple(arguments), None, node.start, collation, strength)

    def case(self, node: Case) -> Typed:
        operand = self.node(node.operand) if node.operand else None
        results, arguments = [], []
        for condition, result in node.whens:
            when = self.node(condition)
            if operand is not None:
                # PostgreSQL prints no cast of the operand in this case.
                self.refuse_if(
                    when.type.name != operand.type.name,
                    condition,
                    f"CASE of {operand.type} with {when.type}",
                )
                when = self.found(condition, "=", [operand, when])
            self.need_boolean(condition, when)
            results.append(self.node(result))
            arguments += [when, results[-1]]
        results.append(self.node(node.default))
        return self.alike(node, "case", results, [*arguments, results[-1]])

    def quantified(self, node: Quantified) -> Typed:
        operand, array = self.node(node.operand), self.node(node.array)
        self.refuse_if(array.type.element is None, node.array, "a list that isn't an array")
        if array.is_null:
            return self.constant(node, BOOL, None)
        if array.key != "array":
            return self.any_of_column(node, operand, array)
        # PostgreSQL computes all elements first, and may fail where Spark stops early.
        self.refuse_if(
            any(not (e.is_constant or e.key == "column") for e in array.arguments),
            node.array,
            "a list that contains more than constants and columns",
        )
        compared = [
            self.found(node, node.operator, [operand, element]) for element in array.arguments
        ]
        self.need_boolean(node, *compared)
        if operand.is_null and compared:
            return self.constant(node, BOOL, None)
        return Typed(node.quantifier.lower(), BOOL, (operand, *compared), node.operator, node.start)

    def any_of_column(self, node: Quantified, operand: Typed, array: Typed) -> Typed:
        element = replace(array, key="element", type=Type(array.type.element or ""), arguments=())
        compared = self.found(node, node.operator, [operand, element])
        self.refuse_if(
            compared.is_null or node.operator not in COMPARISONS,
            node,
            f"{node.operator} {node.quantifier} of a column",
        )
        return Typed(
            f"{node.quantifier.lower()}_element", BOOL, (array, compared, operand), None, node.start
        )


def _moment_refusal(typed: Typed) -> str | None:
    """Returns why a call on dates can't be translated; None if it can."""
    if typed.key in ("extract", "date_part"):
        field, kind = typed.arguments[0].value, typed.arguments[1].type.name
        if field not in PERIODIC | _MONOTONIC or (kind == "date" and field in _TIMES):
            return f"{field!r} of a {kind}"
        if field == "epoch" and kind != "date":
            return "the epoch of a timestamp"
    if typed.key == "date_trunc" and typed.arguments[0].value not in _UNITS:
        return f"date_trunc to {typed.arguments[0].value!r}"
    if typed.key in ("extract", "date_part", "date_trunc") and not typed.arguments[0].is_constant:
        return "a date field whose name isn't a constant"
    return None


_PATTERN_KEYS = frozenset(
    f"{no}{i}{kind}" for no in ("", "not_") for i in ("", "i") for kind in ("like", "regex")
)

_BY_SYNTAX: dict[type, Callable[[_Resolver, Any], Typed]] = {
    Column: _Resolver.column,
    Literal: _Resolver.literal,
    Cast: _Resolver.cast,
    Test: _Resolver.test,
    Quantified: _Resolver.quantified,
    ArrayExpression: lambda self, node: self.array(
        node, [self.node(element) for element in node.elements]
    ),
    Case: _Resolver.case,
    Collate: _Resolver.collate,
    Call: _Resolver.call,
}
