"""All that the rules look at: the template, what it comes to, and what stands beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpc_mp.clouds.azure.evaluate import Known
from hpc_mp.clouds.azure.offer import Offer, load_offer
from hpc_mp.clouds.azure.parameters import Given, Parameter, declared, values
from hpc_mp.clouds.azure.parse import parse
from hpc_mp.clouds.azure.partitions import Partition, partitions
from hpc_mp.clouds.azure.project import Project
from hpc_mp.clouds.azure.resolve import ResolvedCluster, ResolvedNode, clusters
from hpc_mp.clouds.azure.tree import Parsed, TemplateSection


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
    text: str
    parsed: Parsed
    parameters: tuple[Parameter, ...]
    values: Mapping[str, Known]
    clusters: tuple[ResolvedCluster, ...]
    offer: Offer
    given: Given | None
    project: Project | None

    @property
    def sections(self) -> Iterator[TemplateSection]:
        return self.parsed.template.walk()

    @property
    def nodes(self) -> Iterator[ResolvedNode]:
        """Every node of every cluster, abstract ones too."""
        return (node for cluster in self.clusters for node in cluster.nodes)

    @property
    def real(self) -> Iterator[ResolvedNode]:
        """The nodes that can start."""
        return (node for cluster in self.clusters for node in cluster.real)

    @property
    def partitions(self) -> Iterator[Partition]:
        return (each for cluster in self.clusters for each in partitions(cluster, self.offer))


def read_case(text: str, *, file: str = "template", given: Given | None = None, project: Project | None = None) -> Case:
    parsed = parse(text)
    parameters = declared(parsed.template)
    known = values(parameters, given)
    return Case(file, text, parsed, parameters, known, clusters(parsed.template, known), load_offer(), given, project)
