"""Names that templates use, and which of them somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable

from hpc_mp.base.text import nearest

# kind of section: the ranks at which it may stand. Parameters may be nested more or less deeply.
RANKS: dict[str, tuple[int, ...]] = {
    "cluster": (1,), "environment": (1,), "noderef": (1, 2), "node": (2,), "nodearray": (2,),
    "configuration": (3,), "volume": (3,), "network-interface": (3,), "cluster-init": (3,), "input-endpoint": (3,),
    "parameters": (1, 2, 3, 4), "parameter": (1, 2, 3, 4, 5), **dict.fromkeys(("list", "record"), (2, 3, 4, 5, 6)),
}
# kind: the kinds that it may stand in; at rank 1 there is none.
PARENTS: dict[str, tuple[str, ...]] = {
    "node": ("cluster",), "nodearray": ("cluster",), "noderef": ("cluster",),
    **dict.fromkeys(("configuration", "volume", "network-interface", "cluster-init", "input-endpoint"), ("node", "nodearray")),
    "parameters": ("parameters", "cluster"), "parameter": ("parameters", "cluster"),
    **dict.fromkeys(("list", "record"), ("parameter",)),
}
NAMED = ("cluster", "node", "nodearray", "volume", "network-interface", "cluster-init", "input-endpoint", "parameter", "list",
         "record")
NODE_KINDS = ("node", "nodearray")

NODE_ATTRIBUTES = (
    "Abstract", "AdditionalClusterInitSpecs", "AwaitInstallation", "BootDiskSize", "ChefVersion", "CloudInit", "ComputerName",
    "ComputerNamePrefix", "CoreCount", "Count", "Credentials", "DownloadExecCommand", "EnableAcceleratedNetworking",
    "EnableNodeHealthChecks", "EnableTerminateNotification", "Extends", "Fixed", "Image", "ImageId", "ImageName",
    "InitialCoreCount", "InitialCount", "InstallJetpack", "Interruptible", "IsReturnProxy", "JetpackPlatform", "KeepAlive",
    "KeyPairLocation", "Locker", "MachineType", "MaxCoreCount", "MaxCount", "MaxPrice", "NetworkInterfaceId",
    "NodeNameFormat", "Password", "PlacementGroupId", "Priority", "ProximityPlacementGroupId", "Region", "ShutdownPolicy",
    "SSHUserName", "StageResources", "StaticPublicIpAddress", "SubnetId", "Tags", "TerminateNotificationTimeout",
    "UsePublicNetwork", "Username", "Zone",
)
ARRAY_ATTRIBUTES = (
    "MaxCount", "MaxCoreCount", "InitialCount", "InitialCoreCount", "Azure.MaxScalesetSize", "Azure.SinglePlacementGroup",
    "Azure.SingleScaleset", "Azure.Overprovision",
)
PARAMETER_ATTRIBUTES = (
    "Label", "Description", "Required", "Optional", "DefaultValue", "Disabled", "Hidden", "HideLabel", "Order",
    "ParameterType", "Value", "Tooltip",
    "Conditions.Disabled", "Conditions.Excluded", "Conditions.Hidden", "Conditions.Required", "Conditions.Value",
    "Config.Entries", "Config.Filter", "Config.FreeForm", "Config.Increment", "Config.IntegerOnly", "Config.Label",
    "Config.MaxValue", "Config.MinValue", "Config.MultiSelect", "Config.NumLines", "Config.Options", "Config.OS",
    "Config.Parameters", "Config.ParameterType", "Config.PlaceholderText", "Config.Plugin", "Config.Query", "Config.Required",
    "Config.SetDefault", "Config.Template", "Widget.FalseValue", "Widget.Label", "Widget.Plugin", "Widget.Warning",
    "Widget.WarnOnCheck",
)
# kind of section: its attributes, where those are few. Those of nodes and parameters are above.
SECTION_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "cluster": ("AutoScale", "Category", "CategoryOrder", "FormLayout", "IconUrl"),
    "volume": ("Azure.Caching", "Azure.Lun", "Disabled", "Mount", "Persistent", "Size", "SSD", "StorageAccountType", "VolumeId"),
    "network-interface": ("AssociatePublicIpAddress", "NetworkInterfaceId", "PrivateIp", "PublicIp", "SubnetId"),
    "input-endpoint": ("PrivatePort", "Protocol", "PublicPort"),
}
# what is true or false; settings of a configuration have their names in full
BOOLEANS = frozenset(name.casefold() for name in (
    "Abstract", "AssociatePublicIpAddress", "AutoScale", "AwaitInstallation", "Azure.Overprovision",
    "Azure.SinglePlacementGroup", "Azure.SingleScaleset", "Disabled", "EnableAcceleratedNetworking", "EnableNodeHealthChecks",
    "EnableTerminateNotification", "InstallJetpack", "Interruptible", "IsReturnProxy", "KeepAlive", "Persistent", "SSD",
    "UsePublicNetwork", "autoscale.enabled", "slurm.accounting.enabled", "slurm.autoscale", "slurm.default_partition",
    "slurm.enable_healthchecks", "slurm.ha_enabled", "slurm.hpc", "slurm.imex.enabled", "slurm.use_nodename_as_hostname",
    "slurm.use_pcpu",
))
PARAMETER_TYPES = (
    "Boolean", "String", "StringList", "Text", "Integer", "Float", "Number", "Password", "Record", "Expression",
    "HtmlTemplate", "Cloud.Region", "Cloud.MachineType", "Cloud.Image", "Cloud.ClusterInitSpecs", "Cloud.Credentials",
    "Azure.Subnet", "Azure.ManagedIdentity", "Azure.ResourceGroup",
)
SLURM_SETTINGS = (
    "slurm.accounting.certificate", "slurm.accounting.certificate_url", "slurm.accounting.enabled",
    "slurm.accounting.password", "slurm.accounting.storageloc", "slurm.accounting.url", "slurm.accounting.user",
    "slurm.additional.config", "slurm.autoscale", "slurm.autoscale_pkg", "slurm.autoscale_version", "slurm.dampen_memory",
    "slurm.default_partition", "slurm.disable_pmc", "slurm.dynamic_config", "slurm.dynamic_feature",
    "slurm.enable_healthchecks", "slurm.gpu_device_config", "slurm.ha_enabled", "slurm.hpc", "slurm.imex.enabled",
    "slurm.insiders", "slurm.install", "slurm.is_primary_scheduler", "slurm.launch_parameters", "slurm.node_prefix",
    "slurm.overallocation", "slurm.partition", "slurm.primary_scheduler_name", "slurm.resume_timeout", "slurm.role",
    "slurm.secondary_scheduler_name", "slurm.shutdown_policy", "slurm.slurmrestd.user.gid", "slurm.slurmrestd.user.name",
    "slurm.slurmrestd.user.uid", "slurm.suspend_timeout", "slurm.use_nodename_as_hostname", "slurm.use_pcpu",
    "slurm.user.gid", "slurm.user.name", "slurm.user.uid", "slurm.version",
)
FUNCTIONS = (
    "Cluster", "StrJoin", "Size", "Trim", "avg", "bool", "ceiling", "endsWith", "floor", "ifThenElse", "int", "isBoolean",
    "isError", "isInteger", "isList", "isReal", "isString", "isUndefined", "join", "max", "member", "min", "pow", "random",
    "real", "regexp", "regexps", "round", "split", "startsWith", "strcat", "strcmp", "string", "substr", "sum", "time",
    "toLower", "toUpper",
)
GIVEN_NAMES = ("clustername",)  # what CycleCloud itself provides


def meant(word: str, known: Iterable[str], likeness: float = 0.82) -> str | None:
    """The known word that this one is a misspelling of; None if it is none, or is known itself."""
    near = nearest(word, known, likeness)
    return near[0] if near and near[0].casefold() != word.casefold() else None
