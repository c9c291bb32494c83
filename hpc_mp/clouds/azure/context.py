"""The input of the linter's rules: the template, its resolved values, and the files beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpc_mp.base.text import nearest
from hpc_mp.clouds.azure.expression import Known
from hpc_mp.clouds.azure.offer import Offer, load_offer
from hpc_mp.clouds.azure.parameters import Given, Parameter, declared, values
from hpc_mp.clouds.azure.project import Project
from hpc_mp.clouds.azure.resolve import ResolvedCluster, ResolvedNode, clusters
from hpc_mp.clouds.azure.template import Attribute, Parsed, TemplateSection, parse


@dataclass(frozen=True, slots=True)
class Case:
    """A template to check.

    Attributes:
        file: the template's name, as shown in findings.
        values: resolved value of each parameter, by name in lower case.
        given: the file of parameters; None if there is none.
        project: the project's directory; None if there is none.
    """

    file: str
    parsed: Parsed
    parameters: tuple[Parameter, ...]
    values: Mapping[str, Known]
    clusters: tuple[ResolvedCluster, ...]
    offer: Offer
    given: Given | None
    project: Project | None

    @property
    def sections(self) -> Iterator[TemplateSection]:
        return self.parsed.walk()

    @property
    def nodes(self) -> Iterator[ResolvedNode]:
        """All nodes of all clusters, including abstract ones."""
        return (node for cluster in self.clusters for node in cluster.nodes)

    @property
    def real(self) -> Iterator[ResolvedNode]:
        """The nodes that can start."""
        return (node for cluster in self.clusters for node in cluster.real)

    @property
    def partitions(self) -> Iterator[ResolvedNode]:
        return (node for cluster in self.clusters for node in cluster.partitions)


def read_case(text: str, *, file: str = "template", given: Given | None = None, project: Project | None = None) -> Case:
    parsed, offer = parse(text), load_offer()
    parameters = declared(parsed.walk())
    known = values(parameters, given)
    return Case(file, parsed, parameters, known, clusters(parsed.sections, known, offer), offer, given, project)


def evaluated(section: TemplateSection) -> Iterator[Attribute]:
    """Yield the attributes whose values are not only text for the form."""
    for each in section.attributes:
        of_form = each.key.startswith(("config.", "widget.")) and each.assign == "="
        if each.key not in ("label", "description") and not of_form:
            yield each


def meant(word: str, known: Iterable[str], likeness: float = 0.82) -> str | None:
    """Return the known word that this one probably misspells; None if there is none, or if the word itself is known."""
    near = nearest(word, known, likeness)
    return near[0] if near and near[0].casefold() != word.casefold() else None
