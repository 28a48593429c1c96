"""Sections with a list of named members. The mapping `with` of such a section sets keys of its members by name
(`task.with.sst2.path=FOLDER`).
"""

from __future__ import annotations

from pydantic_core import PydanticCustomError

from lmtool.config.auto import merge
from lmtool.config.base import JsonObject
from lmtool.config.nearest import nearest

WITH = "with"


def with_member_values(section: JsonObject) -> JsonObject:
    """Returns the data of a section with the values of `with` merged into its members. Raises pydantic's error if a key
    of `with` names no member."""
    changes, members = section.get(WITH), section.get("members")
    if not isinstance(changes, dict) or not isinstance(members, list):
        return section
    members = list(members)
    titles = [title_of(member) for member in members]
    for name, values in changes.items():
        if name not in titles or not isinstance(values, dict):
            raise PydanticCustomError("value_error", "{problem}", {"problem": _unreached(name, values, titles)})
        number = titles.index(name)
        members[number] = _changed(members[number], values)
    return {**{key: value for key, value in section.items() if key != WITH}, "members": members}


def title_of(member: object) -> str:
    """Returns the name of a member: its `title` if it has one; for a task among objectives, the task's name."""
    if not isinstance(member, dict):
        return str(member)
    if "title" in member:
        return str(member["title"])
    inner = member.get("task")
    return title_of(inner) if inner is not None else str(member.get("name", member.get("kind")))


def _changed(member: object, values: JsonObject) -> JsonObject:
    if not isinstance(member, dict):
        return {"name": member, **values}
    inner = member.get("task")
    return merge(member, values) if inner is None else {**member, "task": _changed(inner, values)}


def _unreached(name: str, values: object, titles: list[str]) -> str:
    if name in titles:
        return f"{WITH}.{name}={values} has no key; write {WITH}.{name}.KEY=VALUE"
    close = nearest(name, titles)
    meant = f"; did you mean {WITH}.{close}?" if close else ""
    return f"{WITH}.{name} names no member; the members are {', '.join(titles)}{meant}"
