"""The catalogue of Azure's sizes and images: complete and consistent."""

from __future__ import annotations

import re

import pytest

from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.offer import load_offer

OFFER = load_offer()
SIZES = list(OFFER.sizes.values())
WANTED = ("Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4", "Standard_ND96isr_H100_v5", "Standard_ND96isr_H200_v5",
          "Standard_ND96isr_MI300X_v5", "Standard_ND128isr_NDR_GB200_v6", "Standard_ND128isr_GB300_v6", "Standard_ND40rs_v2",
          "Standard_NC24rs_v3", "Standard_NC96ads_A100_v4", "Standard_NC80adis_H100_v5", "Standard_HB120rs_v3",
          "Standard_HB176rs_v4", "Standard_HC44rs", "Standard_F2s_v2", "Standard_D4ads_v5",
          "Standard_ND96is_H100_v5", "Standard_ND96is_H200_v5", "Standard_HB368rs_v5")


def test_the_sizes_that_matter_are_there() -> None:
    assert [name for name in WANTED if OFFER.size(name) is None] == []
    assert OFFER.size("standard_nd96ISR_h100_v5") is OFFER.size("Standard_ND96isr_H100_v5")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_the_figures_go_together(size: MachineType) -> None:
    assert size.vcpus > 0 and size.memory_gib > 0 and size.numa > 0 and size.placement_group_max in (100, 300)
    assert size.arch in ("x86_64", "arm64") and set(size.generations) <= {1, 2} and size.generations
    assert bool(size.gpus) == bool(size.gpu)
    assert bool(size.rdma) == bool(size.nics) == bool(size.rdma_gbps)
    assert bool(size.rdma) == bool(re.search(r"\d[a-z]*r[a-z]*(G\d)?(_|$)", size.name.partition("_")[2])), "r is for RDMA"
    assert not size.twin or OFFER.size(size.twin)
    assert size.quota and size.quota_vcpus >= size.vcpus
    assert re.fullmatch(r"(20\d\d-\d\d-\d\d)?", size.retired)


def test_images_are_found_with_and_without_their_version() -> None:
    one = OFFER.image("microsoft-dsvm:ubuntu-hpc:2204:latest")
    assert one is not None and one is OFFER.image("Microsoft-DSVM:ubuntu-hpc:2204") and one.drivers == "nvidia"
    assert OFFER.image("microsoft-dsvm:ubuntu-hpc:2205:latest") is None
    assert {image.drivers for image in OFFER.images.values()} == {"nvidia", "nvidia-v100", "rocm", "none", "unknown"}
