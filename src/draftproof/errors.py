"""Exceptions: each also derives from the built-in that users already catch."""


class ShapeError(ValueError):
    """An array has the wrong number of dimensions or the wrong size along one of them."""


class DtypeError(TypeError):
    """An argument has the wrong kind: dtype, device, array library or Python type."""


class ValueRangeError(ValueError):
    """A value lies outside what the argument allows, or a row of the input has no law to draw from."""


class BackendError(RuntimeError):
    """A backend was named that is unknown or is not available for the operation and device."""
