"""Give every part of an analysed filter its type, and find its row in the table of signatures, or refuse it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from waldelta.errors import FilterNotTranslatable
from waldelta.row_filter import numeric
from waldelta.row_filter.analysed import Collation, RowFilter
from waldelta.row_filter.constants import FORMS, array_elements, interval_parts, numeric_digits
from waldelta.row_filter.moments import check_moment
from waldelta.row_filter.parse import parse_analysed
from waldelta.row_filter.patterns import PatternRefused, java_regex, like_parts, similar_to_regex
from waldelta.row_filter.place import place
from waldelta.row_filter.signatures import CASTS, COMPARISONS, NAMES, SIGNATURES, Signature
from waldelta.row_filter.tree import Array, Call, Case, Cast, Collate, Column, Literal, Node, Quantified, Test, TypeName
from waldelta.row_filter.typed import (
    BOOL,
    FLOATS,
    MAX_DIGITS,
    NUMERIC,
    TEXT,
    TEXTS,
    ColumnType,
    Type,
    Typed,
    short_name,
)

_LOGIC = {"AND": "and", "OR": "or", "NOT": "not"}
_ESCAPES = {"like_escape": "like", "similar_to_escape": "similar", "similar_escape": "similar"}
_LARGEST_INT4 = (1 << 31) - 1
_ORDERED = frozenset({Collation.CODE_POINT, Collation.BINARY_ORDER})
# COLLATE with these is certain in a UTF-8 database.
_NAMED_COLLATIONS = {
    "C": Collation.CODE_POINT, "POSIX": Collation.CODE_POINT, "ucs_basic": Collation.BINARY_ORDER,
    "pg_c_utf8": Collation.BINARY_ORDER,
}  # fmt: skip


def resolve(row_filter: RowFilter, columns: Mapping[str, ColumnType]) -> Typed:
    """The typed filter; raises FilterNotTranslatable with the place of the part that has no certain translation."""
    resolver = _Resolver(row_filter, columns)
    node = parse_analysed(row_filter.analysed)
    typed = resolver.node(node)
    if typed.type != BOOL and typed.type.name != "bool":
        resolver.refuse(node, f"a {typed.type}, where a boolean is wanted")
    return typed


class _Resolver:
    def __init__(self, row_filter: RowFilter, columns: Mapping[str, ColumnType]) -> None:
        self.filter, self.columns = row_filter, columns

    def refuse(self, node: Node | Typed, reason: str) -> NoReturn:
        raise FilterNotTranslatable(self.filter.analysed, place(self.filter.analysed, node.start), reason)

    def node(self, node: Node) -> Typed:
        match node:
            case Column():
                return self.column(node)
            case Literal():
                return self.literal(node)
            case Cast():
                return self.cast(node)
            case Test():
                return self.test(node)
            case Quantified():
                return self.quantified(node)
            case Array():
                return self.array(node, [self.node(element) for element in node.elements])
            case Case():
                return self.case(node)
            case Collate():
                return self.collate(node)
            case Call():
                return self.call(node)

    def column(self, node: Column) -> Typed:
        if (column := self.columns.get(node.name)) is None:
            self.refuse(node, f"column {node.name!r} isn't in the target")
        typed = Typed("column", column.type, value=node.name, start=node.start)
        if column.type.name not in TEXTS and column.type.element not in TEXTS:
            return typed
        collation = self.filter.collations.get(node.name, Collation.DETERMINISTIC)
        return replace(typed, collation=collation, strength=1)

    def literal(self, node: Literal) -> Typed:
        if node.kind in ("true", "false"):
            return Typed("constant", BOOL, value=node.kind, start=node.start)
        if node.kind == "number":
            if node.text.isdigit() and int(node.text) <= _LARGEST_INT4:
                return Typed("constant", Type("int4"), value=node.text, start=node.start)
            return self.constant(node, Type("numeric"), node.text)
        # Only the field of EXTRACT has no cast.
        value = None if node.kind == "null" else node.text
        return self.with_default(Typed("constant", TEXT, value=value, start=node.start))

    def with_default(self, typed: Typed) -> Typed:
        return replace(typed, collation=self.filter.default_collation) if typed.type.name in TEXTS else typed

    def constant(self, node: Node, kind: Type, text: str | None) -> Typed:
        """A constant of a type, checked."""
        if text is None:
            digits = (1, 0) if kind.name == "numeric" and kind.digits is None else kind.digits
            return self.with_default(Typed("constant", replace(kind, digits=digits), value=None, start=node.start))
        form = FORMS.get(kind.name)
        if form is not None and not form.fullmatch(text):
            self.refuse(node, f"a constant of type {kind} in an unusual form")
        if kind.name == "numeric":
            digits = (1, 0) if text[-1].isalpha() else numeric_digits(text)
            if sum(digits) > MAX_DIGITS:
                self.refuse(node, f"a number of more than {MAX_DIGITS} digits")
            kind = replace(kind, digits=digits)
        if kind.name == "interval" and interval_parts(text) is None:
            self.refuse(node, "an interval in an unusual form, or a very long one")
        return self.with_default(Typed("constant", kind, value=text, start=node.start))

    def target(self, node: Cast) -> Type:
        name = short_name(node.type.name)
        if name is None:
            self.refuse(node, f"a cast to {node.type.name}")
        return Type("array", element=name) if node.type.is_array else Type(name)

    def cast(self, node: Cast) -> Typed:
        target = self.target(node)
        if isinstance(node.operand, Literal) and node.operand.kind in ("string", "null"):
            text = None if node.operand.kind == "null" else node.operand.text
            if target.element:
                return self.array_constant(node, target, text)
            return self.modified(node, self.constant(node, target, text))
        operand = self.node(node.operand)
        if target.element:
            return self.array_cast(node, operand, target)
        if operand.is_null:
            return replace(self.constant(node, target, None), start=node.start)
        if operand.is_constant and (folded := self.folded(node, operand, target)) is not None:
            return self.modified(node, folded)
        if operand.type.name == target.name:
            return self.modified(node, operand)
        if (key := CASTS.get((operand.type.name, target.name))) is None:
            self.refuse(node, f"a cast of {operand.type} to {target}")
        if target.name == "numeric":
            target = replace(target, digits=numeric.OF_INTEGERS[operand.type.name])
        typed = Typed(key, target, (operand,), None, node.start, operand.collation, operand.strength)
        if key == "text_to_bpchar" and not node.type.modifiers and node.type.name == "character":
            self.refuse(node, "a cast to character without a length")
        return self.modified(node, typed)

    def folded(self, node: Cast, operand: Typed, target: Type) -> Typed | None:
        """The constant that a cast of a constant makes, where that is plain."""
        source, text = operand.type.name, operand.value or ""
        to_number = source in ("int2", "int4", "int8", "numeric") and target.name in ("numeric", *FLOATS)
        if to_number and text[-1].isdigit():
            return self.constant(node, target, text)
        if {source, target.name} <= {"text", "varchar"}:
            return self.constant(node, target, text)
        return None

    def modified(self, node: Cast, typed: Typed) -> Typed:
        """Apply a type modifier: numeric(5,2), varchar(3), char(3)."""
        modifiers = node.type.modifiers
        if not modifiers or typed.is_null:
            return typed
        if typed.type.name in ("varchar", "bpchar"):
            return replace(typed, key=f"{typed.type.name}_limit", arguments=(typed,), value=str(modifiers[0]))
        if typed.type.name == "numeric":
            precision, scale = (*modifiers, 0)[:2]
            if precision > MAX_DIGITS or scale > precision:
                self.refuse(node, f"a numeric of more than {MAX_DIGITS} digits")
            digits = (precision - scale, scale)
            return Typed("numeric_limit", replace(NUMERIC, digits=digits), (typed,), None, node.start)
        if typed.is_constant:
            return typed  # its value has the modifier already
        self.refuse(node, f"a cast to {node.type.name} with a precision")

    def array_constant(self, node: Cast, target: Type, text: str | None) -> Typed:
        element = Type(target.element or "")
        if text is None:
            return Typed("constant", target, value=None, start=node.start)
        if (texts := array_elements(text)) is None:
            self.refuse(node, "an array that isn't one-dimensional")
        return self.array(node, [self.constant(node, element, each) for each in texts], element.name)

    def array(self, node: Node, elements: list[Typed], element: str | None = None) -> Typed:
        names = {each.type.name for each in elements} | ({element} if element else set())
        if len(names) != 1:
            self.refuse(node, "an array of mixed types")
        collation, strength = self.merged(node, elements)
        kind = Type("array", element=names.pop())
        return Typed("array", kind, tuple(elements), None, node.start, collation, strength)

    def array_cast(self, node: Cast, operand: Typed, target: Type) -> Typed:
        if operand.key == "array":
            casts = [self.element_cast(node, element, target) for element in operand.arguments]
            return self.array(node, casts, target.element)
        if {operand.type.element, target.element} <= {"text", "varchar"} and not node.type.modifiers:
            return replace(operand, type=target)
        self.refuse(node, f"a cast of {operand.type} to {target}")

    def element_cast(self, node: Cast, element: Typed, target: Type) -> Typed:
        kind = Type(target.element or "")
        if element.is_null:
            return self.constant(node, kind, None)
        if {element.type.name, kind.name} <= {"text", "varchar"}:
            return replace(element, type=kind)
        if element.type.name == kind.name:
            return element
        self.refuse(node, f"a cast of an array to {target}")

    def test(self, node: Test) -> Typed:
        operand = self.node(node.operand)
        key = "is_null" if node.what in ("NULL", "UNKNOWN") else f"is_{node.what.lower()}"
        if node.what != "NULL":
            self.need_boolean(node, operand)
        return Typed(key, BOOL, (operand,), "not" if node.negated else "", node.start)

    def need_boolean(self, node: Node, *typed: Typed) -> None:
        for each in typed:
            if each.type.name != "bool":
                self.refuse(node, f"a {each.type}, where a boolean is wanted")

    def collate(self, node: Collate) -> Typed:
        operand = self.node(node.operand)
        collation = _NAMED_COLLATIONS.get(node.collation)
        if collation is None or not self.filter.is_utf8:
            self.refuse(node, f"the collation {node.collation}, whose rules are not certain here")
        return replace(operand, collation=collation, strength=2)

    def merged(self, node: Node, operands: list[Typed]) -> tuple[Collation | None, int]:
        """The collation of a call: an explicit one, else the columns', else the database's."""
        texts = [o for o in operands if o.collation is not None]
        strength = max((o.strength for o in texts), default=0)
        found = {o.collation for o in texts if o.strength == strength}
        # Two columns' collations can be two languages'; PostgreSQL says so only when it meets a row.
        if len(found) > 1:
            self.refuse(node, "texts of different collations")
        return (found.pop() if found else None), strength

    def call(self, node: Call) -> Typed:
        if node.name in ("COALESCE", "GREATEST", "LEAST", "NULLIF"):
            return self.lazy(node)
        arguments = [self.node(argument) for argument in node.arguments]
        if node.name in _LOGIC:
            self.need_boolean(node, *arguments)
            return Typed(_LOGIC[node.name], BOOL, tuple(arguments), None, node.start)
        if node.name == "IS DISTINCT FROM":
            compared = self.found(node, "=", arguments)
            return replace(compared, key="is_distinct", type=BOOL)
        if node.name in _ESCAPES:
            return self.escaped(node, arguments)
        return self.found(node, node.name, arguments)

    def found(self, node: Node, name: str, arguments: list[Typed]) -> Typed:
        names = tuple("array" if a.type.element else a.type.name for a in arguments)
        if (signature := SIGNATURES.get((name, names))) is None:
            # A varchar is a text wherever PostgreSQL prints no cast.
            names = tuple("text" if n == "varchar" else n for n in names)
            signature = SIGNATURES.get((name, names))
        if signature is None:
            kinds = ", ".join(str(a.type) for a in arguments)
            what = f"{name} of {kinds}" if name in NAMES else f"{name}, which isn't among the functions"
            self.refuse(node, f"{what} that can be translated")
        collation, strength = self.merged(node, arguments)
        self.demands(node, signature, arguments, collation)
        typed = Typed(signature.key, Type(signature.result), tuple(arguments), None, node.start)
        if signature.result == "text":
            typed = replace(typed, collation=collation or self.filter.default_collation, strength=strength)
        return self.special(node, typed, collation)

    def demands(self, node: Node, signature: Signature, arguments: list[Typed], collation: Collation | None) -> None:
        if collation is Collation.NONDETERMINISTIC:
            self.refuse(node, "a text of a nondeterministic collation")
        if "o" in signature.flags and collation not in _ORDERED:
            self.refuse(node, 'the order of texts, which depends on the collation (add COLLATE "C" if that is meant)')
        if "c" in signature.flags and collation is not Collation.CODE_POINT:
            self.refuse(node, 'upper and lower case, which depend on the collation (add COLLATE "C" if that is meant)')
        if "u" in signature.flags and not self.filter.is_utf8:
            self.refuse(node, "bytes of a text, which depend on the server's encoding")
        first = signature.constants_from
        if first is not None and not all(a.is_constant or a.key == "pattern" for a in arguments[first:]):
            self.refuse(arguments[first], "something that changes from row to row, where only a constant is translated")

    def special(self, node: Node, typed: Typed, collation: Collation | None) -> Typed:
        """What a signature's row can't say: digits, patterns, fields of dates, elements of arrays."""
        if any(a.is_null for a in typed.arguments):
            # Strict: PostgreSQL folds such a call into NULL without looking at its other arguments.
            return self.constant(node, typed.type, None)
        if typed.key in _PATTERN_KEYS:
            return self.pattern(node, typed, collation)
        if typed.arguments[0].type.element and len(typed.arguments) == 2 and typed.arguments[1].type.element:
            self.same_elements(node, typed)
        if reason := check_moment(typed):
            self.refuse(node, reason)
        if typed.type.name == "numeric" or typed.arguments[0].type.name == "numeric":
            try:
                return numeric.with_digits(typed)
            except numeric.TooManyDigits as err:
                self.refuse(node, str(err))
        if typed.key == "array_length" and typed.arguments[1].value != "1":
            self.refuse(node, "array_length of another dimension than the first")
        return typed

    def same_elements(self, node: Node, typed: Typed) -> None:
        one, two = ({"varchar": "text"}.get(a.type.element or "", a.type.element) for a in typed.arguments)
        if one != two or one not in ("int2", "int4", "int8", "text", "bool", "uuid"):
            self.refuse(node, f"arrays of {one} and {two}")

    def escaped(self, node: Call, arguments: list[Typed]) -> Typed:
        """like_escape() or similar_to_escape() of constants: a pattern."""
        if not all(a.is_constant and a.value is not None for a in arguments):
            self.refuse(node, "a pattern that isn't a constant")
        texts = [a.value or "" for a in arguments]
        if len(texts) > 1 and len(texts[1]) > 1:
            self.refuse(node, "an escape of more than one character")
        escape = texts[1] if len(texts) > 1 else "\\"
        pattern = replace(arguments[0], key="pattern", strength=0)
        return replace(pattern, arguments=(replace(pattern, key=_ESCAPES[node.name], value=escape),))

    def pattern(self, node: Node, typed: Typed, collation: Collation | None) -> Typed:
        subject, pattern = typed.arguments
        text, escape = pattern.value or "", pattern.arguments[0] if pattern.arguments else None
        is_like = typed.key.endswith("like")
        if escape is not None and is_like != (escape.key == "like"):
            self.refuse(node, "an escape of LIKE in SIMILAR TO, or the reverse")
        try:
            if is_like:
                like_parts(text, escape.value or "" if escape else "\\")
                value = (escape.value or "" if escape else "\\") + "\n" + text
            else:
                regex = similar_to_regex(text, escape.value or "") if escape else text
                value = java_regex(regex, certain_case=collation is Collation.CODE_POINT)
        except PatternRefused as err:
            self.refuse(node, f"a pattern with {err}")
        return replace(typed, arguments=(subject,), value=value)

    def lazy(self, node: Call) -> Typed:
        arguments = [self.node(argument) for argument in node.arguments]
        if node.name == "NULLIF":
            compared = self.found(node, "=", arguments)
            if compared.is_null:
                return arguments[0]
            return replace(arguments[0], key="nullif", arguments=compared.arguments, value=None, start=node.start)
        if node.name != "COALESCE":
            self.found(node, "<", arguments[:2])  # they need an order
        return self.alike(node, node.name.lower(), arguments, arguments)

    def alike(self, node: Node, key: str, results: list[Typed], arguments: list[Typed]) -> Typed:
        """An expression whose results, all of one type, become its own."""
        names = {r.type.name for r in results}
        if len(names) != 1 or any(r.type.element or r.type.name == "opaque" for r in results):
            self.refuse(node, f"results of types {', '.join(sorted(str(r.type) for r in results))}")
        kind = results[0].type
        if kind.name == "numeric":
            kind = replace(NUMERIC, digits=numeric.common([r.type for r in results]))
            if sum(kind.digits or ()) > MAX_DIGITS:
                self.refuse(node, f"numbers that need more than {MAX_DIGITS} digits together")
        collation, strength = self.merged(node, results)
        return Typed(key, Type(kind.name, kind.digits), tuple(arguments), None, node.start, collation, strength)

    def case(self, node: Case) -> Typed:
        operand = self.node(node.operand) if node.operand else None
        results, arguments = [], []
        for condition, result in node.whens:
            when = self.node(condition)
            if operand is not None:
                if when.type.name != operand.type.name:
                    # PostgreSQL prints no cast of the operand here.
                    self.refuse(condition, f"CASE of {operand.type} with {when.type}")
                when = self.found(condition, "=", [operand, when])
            self.need_boolean(condition, when)
            results.append(self.node(result))
            arguments += [when, results[-1]]
        results.append(self.node(node.default))
        return self.alike(node, "case", results, [*arguments, results[-1]])

    def quantified(self, node: Quantified) -> Typed:
        operand, array = self.node(node.operand), self.node(node.array)
        if array.type.element is None:
            self.refuse(node.array, "a list that isn't an array")
        if array.is_null:
            return self.constant(node, BOOL, None)
        if array.key != "array":
            return self.any_of_column(node, operand, array)
        if any(not (e.is_constant or e.key == "column") for e in array.arguments):
            # PostgreSQL computes all of them first, and may fail where Spark stops early.
            self.refuse(node.array, "a list of more than constants and columns")
        compared = [self.found(node, node.operator, [operand, element]) for element in array.arguments]
        self.need_boolean(node, *compared)
        if operand.is_null and compared:
            return self.constant(node, BOOL, None)
        key = node.quantifier.lower()
        return Typed(key, BOOL, (operand, *compared), node.operator, node.start)

    def any_of_column(self, node: Quantified, operand: Typed, array: Typed) -> Typed:
        element = replace(array, key="element", type=Type(array.type.element or ""), arguments=())
        compared = self.found(node, node.operator, [operand, element])
        if compared.is_null or node.operator not in COMPARISONS:
            self.refuse(node, f"{node.operator} {node.quantifier} of a column")
        return Typed(f"{node.quantifier.lower()}_element", BOOL, (array, compared, operand), None, node.start)


_PATTERN_KEYS = frozenset(f"{no}{i}{kind}" for no in ("", "not_") for i in ("", "i") for kind in ("like", "regex"))

__all__ = ["TypeName", "resolve"]
