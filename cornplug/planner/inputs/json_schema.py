"""JSON schema (draft 2020-12) of a plan's TOML file, generated from the pydantic models of its tables.

The schema covers keys, types, ranges, and rules on several keys of a table. Names, files, prices and
comparisons of two numbers are checked by `toml_reader.py` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from cornplug.planner.inputs.components import SHAPES
from cornplug.planner.inputs.schema import PlanInput

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_BOUND_KEYS: Final = ("ttft_s", "tpot_s", "e2e_s", "ttft_slowdown", "tpot_slowdown", "e2e_slowdown")
_BOUNDS: Final = [{"required": [key]} for key in _BOUND_KEYS]
_SLOWDOWNS: Final = [{"required": [key]} for key in _BOUND_KEYS if key.endswith("slowdown")]
_HAS_BOUND: Final = {"anyOf": [*_BOUNDS, {"properties": {"also": {"minItems": 1}}, "required": ["also"]}]}
_HAS_SLO_BOUND: Final = {"properties": {"slo": _HAS_BOUND}, "required": ["slo"]}


def _if(condition: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    return {"if": condition, "then": then}


def _key_equals(key: str, value: str, *, default: bool = False) -> dict[str, Any]:
    """Return a schema that matches a table whose key has this value. With `default`, a table without the key
    also matches."""
    return {"properties": {key: {"const": value}}} | ({} if default else {"required": [key]})


_TABLE_RULES: Final[Mapping[str, list[dict[str, Any]]]] = {
    "Component": [
        *(
            _if(_key_equals("kind", kind), {"properties": {"shape": {"$ref": f"#/$defs/{shape.__name__}"}}})
            for kind, shape in SHAPES.items()
        ),
        {"if": _key_equals("kind", "encoder"), "else": {"properties": {"tower_of": False}}},
        _if(_key_equals("speculative", "eagle3"), {"required": ["speculative_model"]}),
    ],
    "RequestSpec": [
        {"oneOf": [{"required": [key]} for key in ("rate", "rate_by_hour", "job")]},
        {"properties": {"rate_by_hour": {"contains": {"exclusiveMinimum": 0}}}},
        {"dependentSchemas": {"trace": {"properties": {"prompt": False, "output": False}}}},
    ],
    "PercentileBounds": [{"anyOf": _BOUNDS}],
    "Slo": [
        _if(
            {
                "anyOf": [
                    *_SLOWDOWNS,
                    {"properties": {"also": {"contains": {"anyOf": _SLOWDOWNS}}}, "required": ["also"]},
                ]
            },
            {"required": ["idle"]},
        )
    ],
    "Application": [
        _if(
            _key_equals("workload", "online", default=True),
            {
                "properties": {"requests": {"items": {"properties": {"slo": _HAS_BOUND}}}},
                "anyOf": [_HAS_SLO_BOUND, {"properties": {"requests": {"items": _HAS_SLO_BOUND}}}],
            },
        ),
        _if(
            {"properties": {"structures": {"contains": {"const": "+G"}}}, "required": ["structures"]},
            {"properties": {"requests": {"contains": {"required": ["generates"]}}}},
        ),
        {"properties": {"structures": {"minItems": 1}}},
    ],
}
"""Rules on several keys of one table, by table. The same rules are in the table's validators and in
`cross_checks.py`."""


class _TomlSchema(GenerateJsonSchema):
    """Schema generator for TOML. TOML has no null, so the schema of an optional key does not allow null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if made.get("default", 0) is None:
            del made["default"]
        return made

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        made = super().tagged_union_schema(schema)
        made.pop("discriminator", None)  # only OpenAPI uses it; each member has its own `kind`
        return made


def plan_schema(file: type[PlanInput] = PlanInput) -> dict[str, Any]:
    """Return the JSON schema of an input file, as data for `json.dumps`."""
    schema = file.model_json_schema(schema_generator=_TomlSchema)
    tables = cast(dict[str, dict[str, Any]], schema["$defs"])
    for name, rules in _TABLE_RULES.items():
        tables[name]["allOf"] = rules
    tables["RequestSpec"]["required"].remove("rate")  # may follow from `job` or `rate_by_hour`
    for table in tables.values():
        if table["properties"].get("kind", {}).get("const") in ("throughput", "table", "roofline"):
            table["required"] = ["kind", *table.get("required", ())]
    return {"$schema": DIALECT, **schema}
