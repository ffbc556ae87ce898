"""The three gRPC APIs that a kubelet plugin speaks, without a protobuf compiler.

Messages are declared as `"field": (number, type)`; a type is a scalar's name,
a message's name, `[type]` for a repeated field or `{str: type}` for a map.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {"string": Field.TYPE_STRING, "bool": Field.TYPE_BOOL, "int32": Field.TYPE_INT32, "int64": Field.TYPE_INT64}
Schema = Mapping[str, Mapping[str, tuple[int, Any]]]
Handler = Callable[[Any, grpc.ServicerContext], Any]

REGISTRATION: Schema = {  # package pluginregistration
    "PluginInfo": {
        "type": (1, "string"),
        "name": (2, "string"),
        "endpoint": (3, "string"),
        "supported_versions": (4, ["string"]),
    },
    "RegistrationStatus": {"plugin_registered": (1, "bool"), "error": (2, "string")},
    "RegistrationStatusResponse": {},
    "InfoRequest": {},
}
DEVICE_PLUGIN: Schema = {  # package v1beta1
    "Empty": {},
    "DevicePluginOptions": {"pre_start_required": (1, "bool"), "get_preferred_allocation_available": (2, "bool")},
    "Device": {"ID": (1, "string"), "health": (2, "string")},
    "ListAndWatchResponse": {"devices": (1, ["Device"])},
    "ContainerAllocateRequest": {"devices_ids": (1, ["string"])},
    "AllocateRequest": {"container_requests": (1, ["ContainerAllocateRequest"])},
    "Mount": {"container_path": (1, "string"), "host_path": (2, "string"), "read_only": (3, "bool")},
    "DeviceSpec": {"container_path": (1, "string"), "host_path": (2, "string"), "permissions": (3, "string")},
    "ContainerAllocateResponse": {
        "envs": (1, {"string": "string"}),
        "mounts": (2, ["Mount"]),
        "devices": (3, ["DeviceSpec"]),
        "annotations": (4, {"string": "string"}),
    },
    "AllocateResponse": {"container_responses": (1, ["ContainerAllocateResponse"])},
}
DRA: Schema = {  # package k8s.io.kubelet.pkg.apis.dra.v1
    "Claim": {"namespace": (1, "string"), "uid": (2, "string"), "name": (3, "string")},
    "Device": {
        "request_names": (1, ["string"]),
        "pool_name": (2, "string"),
        "device_name": (3, "string"),
        "cdi_device_ids": (4, ["string"]),
    },
    "NodePrepareResourcesRequest": {"claims": (1, ["Claim"])},
    "NodePrepareResourceResponse": {"devices": (1, ["Device"]), "error": (2, "string")},
    "NodePrepareResourcesResponse": {"claims": (1, {"string": "NodePrepareResourceResponse"})},
    "NodeUnprepareResourcesRequest": {"claims": (1, ["Claim"])},
    "NodeUnprepareResourceResponse": {"error": (1, "string")},
    "NodeUnprepareResourcesResponse": {"claims": (1, {"string": "NodeUnprepareResourceResponse"})},
}


def messages(package: str, schema: Schema) -> dict[str, Any]:
    """The message classes of a schema, by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            label = Field.LABEL_OPTIONAL
            if isinstance(kind, list):
                label, (kind,) = Field.LABEL_REPEATED, kind
            elif isinstance(kind, dict):
                label, entry = Field.LABEL_REPEATED, message.nested_type.add()
                entry.name = "".join(part.capitalize() for part in field.split("_")) + "Entry"
                entry.options.map_entry = True
                for index, (part, of) in enumerate(zip(("key", "value"), next(iter(kind.items())), strict=True), 1):
                    _field(entry, package, part, index, Field.LABEL_OPTIONAL, of)
                kind = f"{name}.{entry.name}"
            _field(message, package, field, number, label, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in schema}


def _field(message: Any, package: str, name: str, number: int, label: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=label)
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{package}.{kind}"


def service(name: str, handlers: Mapping[str, tuple[Any, Handler]]) -> Any:
    """A gRPC service; a handler that is a generator function becomes a server stream."""

    def method(request: Any, handler: Handler) -> Any:
        streams = inspect.isgeneratorfunction(handler)
        make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        return make(handler, request.FromString, lambda reply: reply.SerializeToString())

    return grpc.method_handlers_generic_handler(name, {rpc: method(*pair) for rpc, pair in handlers.items()})


def serve(kind: str, name: str, versions: list[str], api: Any) -> grpc.Server:
    """Serves `api` and announces it in the kubelet's plugin directory.

    The kubelet watches that directory, so the plugin is found again after a
    kubelet's restart without doing anything.
    """
    types = messages("pluginregistration", REGISTRATION)
    root, file = Path("/var/lib/kubelet"), name.replace("/", "-")
    endpoint, registry = root / "plugins" / file / "plugin.sock", root / "plugins_registry" / f"{file}.sock"

    def info(_request: Any, _context: grpc.ServicerContext) -> Any:
        return types["PluginInfo"](type=kind, name=name, endpoint=str(endpoint), supported_versions=versions)

    def status(request: Any, _context: grpc.ServicerContext) -> Any:
        print(f"registered={request.plugin_registered} {request.error}", flush=True)
        return types["RegistrationStatusResponse"]()

    registration = service(
        "pluginregistration.Registration",
        {"GetInfo": (types["InfoRequest"], info), "NotifyRegistrationStatus": (types["RegistrationStatus"], status)},
    )
    for socket in (endpoint, registry):
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    server.add_generic_rpc_handlers((registration, api))
    server.add_insecure_port(f"unix://{endpoint}")
    server.add_insecure_port(f"unix://{registry}")
    server.start()
    return server
