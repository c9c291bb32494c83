"""Run by a Python that has aws-parallelcluster: what its own schema says. Nobody at AWS is asked, no credentials are needed.

``keys``: all keys as a tree.   ``check FILE…``: a JSON list, for each file the mistakes that the schema finds, and
those validators that look at the configuration alone (sizes, Slurm's denied settings, placement groups, storage).
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {  # some defaults depend on the region; whatever would ask AWS gets no answer
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}

import yaml
from marshmallow import ValidationError, fields
from pcluster.schemas.cluster_schema import ClusterSchema, OneOrManyCustomActionField
from pcluster.validators import cluster_validators, fsx_validators, slurm_settings_validator


def keys(schema):
    tree = {}
    for name, field in schema.fields.items():
        inner = field.inner if isinstance(field, fields.List) else field
        key = field.data_key or "".join(part.capitalize() for part in name.split("_"))
        tree[key] = keys(inner.schema) if isinstance(inner, fields.Nested) else None
        if isinstance(inner, OneOrManyCustomActionField):
            tree[key] = {**tree[key], "Sequence": tree[key]}
    return tree


def mistakes(path):
    with open(path, encoding="utf-8") as file:
        data = yaml.safe_load(file)
    try:
        config = ClusterSchema(cluster_name="train").load(data)
    except ValidationError as error:
        return [json.dumps(error.messages)]
    return [f"{type(validator).__name__}: {result.message}" for validator, arguments in offline(config)
            for result in validator.execute(**arguments) if result.level.name == "ERROR"]


def offline(config):
    denied = slurm_settings_validator.SLURM_SETTINGS_DENY_LIST["SlurmConf"]["Global"]
    yield slurm_settings_validator.CustomSlurmSettingsValidator(), {
        "custom_settings": config.scheduling.settings.custom_slurm_settings, "deny_list": denied,
        "settings_level": slurm_settings_validator.CustomSlurmSettingLevel.SLURM_CONF}
    for queue in config.scheduling.queues:
        for resource in queue.compute_resources:
            placement = queue.get_chosen_placement_group_setting_for_compute_resource(resource)
            yield cluster_validators.ComputeResourceSizeValidator(), {
                "min_count": resource.min_count, "max_count": resource.max_count, "capacity_type": queue.capacity_type}
            yield cluster_validators.EfaPlacementGroupValidator(), {
                "efa_enabled": resource.efa.enabled, "multi_az_enabled": False, "capacity_type": queue.capacity_type,
                "placement_group_key": queue.get_placement_group_settings_for_compute_resource(resource).get("key"),
                "placement_group_disabled": placement.enabled is False, "queue_name": queue.name}
            yield cluster_validators.NameValidator(), {"name": resource.name}
        yield cluster_validators.NameValidator(), {"name": queue.name}
    for storage in config.shared_storage or []:
        yield cluster_validators.SharedStorageNameValidator(), {"name": storage.name}
        if storage.shared_storage_type.name == "FSX":
            yield fsx_validators.FsxStorageCapacityValidator(), {
                "storage_capacity": storage.storage_capacity, "deployment_type": storage.deployment_type,
                "fsx_storage_type": storage.fsx_storage_type, "per_unit_storage_throughput": storage.per_unit_storage_throughput,
                "file_system_id": None, "backup_id": None}


if sys.argv[1] == "keys":
    print(json.dumps(keys(ClusterSchema(cluster_name="train")), indent=1))
else:
    print(json.dumps([mistakes(path) for path in sys.argv[2:]]))
