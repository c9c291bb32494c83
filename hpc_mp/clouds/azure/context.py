"""All that the rules look at: the template, what it comes to, and what stands beside it."""

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
    """One template to judge.

    Attributes:
        file: the template's name, as it is shown.
        values: what each parameter comes to, by name in lower case.
        given: the file of parameters, None without one.
        project: the project's directory, None without one.
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
        """Every node of every cluster, abstract ones too."""
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
    """The attributes whose values are more than text for the form."""
    for each in section.attributes:
        of_form = each.key.startswith(("config.", "widget.")) and each.assign == "="
        if each.key not in ("label", "description") and not of_form:
            yield each


def meant(word: str, known: Iterable[str], likeness: float = 0.82) -> str | None:
    """The known word that this one is a misspelling of; None if it is none, or is known itself."""
    near = nearest(word, known, likeness)
    return near[0] if near and near[0].casefold() != word.casefold() else None
