"""Columns, constants, casts and arrays of a filter, with their types."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from waldelta.errors import FilterNotTranslatable
from waldelta.row_filter import _numeric as numeric
from waldelta.row_filter._constants import FORMS, array_elements, interval_parts, numeric_digits
from waldelta.row_filter._signatures import CASTS
from waldelta.row_filter.analyzed_filter import Collation, RowFilter
from waldelta.row_filter.parse.place import place
from waldelta.row_filter.parse.tree import Cast, Column, Literal, Node
from waldelta.row_filter.typed_tree import (
    BOOL,
    FLOATS,
    NUMERIC,
    TEXT,
    TEXTS,
    Type,
    Typed,
    short_name,
)
from waldelta.types.numeric import MAX_PRECISION

_LARGEST_INT4 = (1 << 31) - 1


class Operands(ABC):
    """Gives types to the operands of a filter's calls."""

    def __init__(self, row_filter: RowFilter, columns: Mapping[str, Type]) -> None:
        self.filter, self.columns = row_filter, columns

    def refused(self, node: Node | Typed, reason: str) -> FilterNotTranslatable:
        """Return the error for a part that has no certain translation, with its position."""
        return FilterNotTranslatable(
            self.filter.analysed, place(self.filter.analysed, node.start), reason
        )

    @abstractmethod
    def node(self, node: Node) -> Typed:
        """Return the typed form of any node."""

    def column(self, node: Column) -> Typed:
        """Return a column of the target, with what is certain about its collation."""
        if (column := self.columns.get(node.name)) is None:
            raise self.refused(node, f"column {node.name!r} isn't in the target")
        typed = Typed("column", column, value=node.name, start=node.start)
        if column.name not in TEXTS and column.element not in TEXTS:
            return typed
        collation = self.filter.collations.get(node.name, Collation.DETERMINISTIC)
        return replace(typed, collation=collation, strength=1)

    def literal(self, node: Literal) -> Typed:
        """Return a constant that is printed without a cast."""
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
        """Return the node with the database's collation, if it is a text."""
        return (
            replace(typed, collation=self.filter.default_collation)
            if typed.type.name in TEXTS
            else typed
        )

    def constant(self, node: Node, kind: Type, text: str | None) -> Typed:
        """Return a constant of a type, after a check of its text."""
        if text is None:
            digits = (1, 0) if kind.name == "numeric" and kind.digits is None else kind.digits
            return self.with_default(
                Typed("constant", replace(kind, digits=digits), value=None, start=node.start)
            )
        form = FORMS.get(kind.name)
        if form is not None and not form.fullmatch(text):
            raise self.refused(node, f"a constant of type {kind} in an unusual form")
        if kind.name == "numeric":
            digits = (1, 0) if text[-1].isalpha() else numeric_digits(text)
            if sum(digits) > MAX_PRECISION:
                raise self.refused(node, f"a number of more than {MAX_PRECISION} digits")
            kind = replace(kind, digits=digits)
        if kind.name == "interval" and interval_parts(text) is None:
            raise self.refused(node, "an interval in an unusual form, or a very long one")
        return self.with_default(Typed("constant", kind, value=text, start=node.start))

    def target(self, node: Cast) -> Type:
        """Return the target type of a cast."""
        name = short_name(node.type.name)
        if name is None:
            raise self.refused(node, f"a cast to {node.type.name}")
        return Type("array", element=name) if node.type.is_array else Type(name)

    def cast(self, node: Cast) -> Typed:
        """Return a cast, or a constant: PostgreSQL prints most constants as casts of strings."""
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
            return self.constant(node, target, None)
        return self.modified(node, self.scalar_cast(node, operand, target))

    def scalar_cast(self, node: Cast, operand: Typed, target: Type) -> Typed:
        """Return a cast by its row in the table, without the type's modifiers."""
        if operand.is_constant and (folded := self.folded(node, operand, target)) is not None:
            return folded
        if operand.type.name == target.name:
            return operand
        if (key := CASTS.get((operand.type.name, target.name))) is None:
            raise self.refused(node, f"a cast of {operand.type} to {target}")
        if target.name == "numeric":
            target = replace(target, digits=numeric.OF_INTEGERS[operand.type.name])
        if key == "text_to_bpchar" and not node.type.modifiers and node.type.name == "character":
            raise self.refused(node, "a cast to character without a length")
        return Typed(key, target, (operand,), None, node.start, operand.collation, operand.strength)

    def folded(self, node: Cast, operand: Typed, target: Type) -> Typed | None:
        """Return the constant that a cast of a constant produces, where that is simple."""
        source, text = operand.type.name, operand.value or ""
        to_number = source in ("int2", "int4", "int8", "numeric") and target.name in (
            "numeric",
            *FLOATS,
        )
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
            return replace(
                typed, key=f"{typed.type.name}_limit", arguments=(typed,), value=str(modifiers[0])
            )
        if typed.type.name == "numeric":
            precision, scale = (*modifiers, 0)[:2]
            if precision > MAX_PRECISION or scale > precision:
                raise self.refused(node, f"a numeric of more than {MAX_PRECISION} digits")
            digits = (precision - scale, scale)
            return Typed(
                "numeric_limit", replace(NUMERIC, digits=digits), (typed,), None, node.start
            )
        if typed.is_constant:
            return typed  # The constant's value has the modifier already.
        raise self.refused(node, f"a cast to {node.type.name} with a precision")

    def array_constant(self, node: Cast, target: Type, text: str | None) -> Typed:
        """``'{…}'::type[]``."""
        element = Type(target.element or "")
        if text is None:
            return Typed("constant", target, value=None, start=node.start)
        if (texts := array_elements(text)) is None:
            raise self.refused(
                node, "an array with more than one dimension, or whose index doesn't start at 1"
            )
        return self.array(
            node, [self.constant(node, element, each) for each in texts], element.name
        )

    def array(self, node: Node, elements: list[Typed], element: str | None = None) -> Typed:
        """Return ``ARRAY[…]`` of typed elements, all of one type."""
        names = {each.type.name for each in elements} | ({element} if element else set())
        if len(names) != 1:
            raise self.refused(node, "an array of mixed types")
        collation, strength = self.merged(node, elements)
        kind = Type("array", element=names.pop())
        return Typed("array", kind, tuple(elements), None, node.start, collation, strength)

    def array_cast(self, node: Cast, operand: Typed, target: Type) -> Typed:
        """Return a cast of a whole array, applied to its elements."""
        if operand.key == "array":
            casts = [self.element_cast(node, element, target) for element in operand.arguments]
            return self.array(node, casts, target.element)
        if {operand.type.element, target.element} <= {
            "text",
            "varchar",
        } and not node.type.modifiers:
            return replace(operand, type=target)
        raise self.refused(node, f"a cast of {operand.type} to {target}")

    def element_cast(self, node: Cast, element: Typed, target: Type) -> Typed:
        """Return a cast of an array, for one of its elements."""
        kind = Type(target.element or "")
        if element.is_null:
            return self.constant(node, kind, None)
        if {element.type.name, kind.name} <= {"text", "varchar"}:
            return replace(element, type=kind)
        if element.type.name == kind.name:
            return element
        raise self.refused(node, f"a cast of an array to {target}")

    def merged(self, node: Node, operands: list[Typed]) -> tuple[Collation | None, int]:
        """Return the collation of a call: an explicit one, else the columns', else the
        database's.
        """
        texts = [o for o in operands if o.collation is not None]
        strength = max((o.strength for o in texts), default=0)
        found = {o.collation for o in texts if o.strength == strength}
        # Two columns may have collations of two languages; PostgreSQL raises an error only when it
        # evaluates a row.
        if len(found) > 1:
            raise self.refused(node, "texts of different collations")
        return (found.pop() if found else None), strength
