// Arrays of NumPy and torch, looked at in place. Part of bindings.cpp, as arguments.h and results.h are.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>

namespace draftproof {

namespace nb = nanobind;

// DLPack's table of C functions, which torch hangs on its tensor type: a crossing costs a tenth of one through Python.
struct ManagedTensor {
  uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedTensor*);
  uint64_t flags;
  nb::dlpack::dltensor tensor;
};

struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  void* allocate;
  void* to_managed;
  int (*from_managed)(ManagedTensor*, void** tensor);
  int (*borrow)(void* tensor, nb::dlpack::dltensor*);
  void* stream;
};

struct Torch {
  PyObject* tensor_type;
  const ExchangeApi* api;

  // Null where torch is not imported, or is too old to have the table: its tensors then take the full path.
  static const Torch* get() {
    static Torch* found = nullptr;
    if (found) return found;
    const nb::object torch = nb::module_::import_("sys").attr("modules").attr("get")("torch");
    const nb::object type = nb::getattr(torch, "Tensor", nb::none());
    const nb::object table = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    if (table.is_none()) return nullptr;
    const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
    if (!api) nb::raise_python_error();
    if (api->major == nb::dlpack::major_version) found = new Torch{nb::object(type).release().ptr(), api};
    return found;
  }
};

struct Numpy {
  PyObject* array_type;
  PyObject *empty, *int64, *int32, *float32, *boolean;

  static const Numpy& get() {
    static const Numpy* const found = [] {
      const nb::module_ numpy = nb::module_::import_("numpy");
      const auto dtype = [&](const char* name) { return numpy.attr("dtype")(name).release().ptr(); };
      return new Numpy{nb::object(numpy.attr("ndarray")).release().ptr(), nb::object(numpy.attr("empty")).release().ptr(),
                       dtype("int64"), dtype("int32"), dtype("float32"), dtype("bool")};
    }();
    return *found;
  }
};

// Exact types: a subclass may mean something else by its values.
inline bool is_numpy(nb::handle h) { return h.type().ptr() == Numpy::get().array_type; }
inline bool is_tensor(const Torch& torch, nb::handle h) { return h.type().ptr() == torch.tensor_type; }

enum class Items { none, f16, bf16, f32, f64, i32, i64, u64, boolean };

// An array in memory, strides in items.
struct View {
  const void* data = nullptr;
  int ndim = 0;
  int64_t shape[3] = {}, stride[3] = {};
  Items items = Items::none;
};

inline Items items_of(char format, Py_ssize_t size) {
  switch (format) {
    case 'e': return Items::f16;
    case 'f': return Items::f32;
    case 'd': return Items::f64;
    case '?': return Items::boolean;
    case 'i': case 'l': case 'q': return size == 8 ? Items::i64 : Items::i32;
    case 'L': case 'Q': return size == 8 ? Items::u64 : Items::none;
    default: return Items::none;
  }
}

inline Items items_of(const nb::dlpack::dtype& type) {
  using Code = nb::dlpack::dtype_code;
  if (type.lanes != 1) return Items::none;
  switch (static_cast<Code>(type.code)) {
    case Code::Float:
      return type.bits == 32   ? Items::f32
             : type.bits == 64 ? Items::f64
             : type.bits == 16 ? Items::f16
                               : Items::none;
    case Code::Bfloat: return Items::bf16;
    case Code::Int: return type.bits == 64 ? Items::i64 : type.bits == 32 ? Items::i32 : Items::none;
    case Code::UInt: return type.bits == 64 ? Items::u64 : Items::none;
    case Code::Bool: return Items::boolean;
    default: return Items::none;
  }
}

inline bool readable(const View& v, int64_t item) {
  if (std::find(v.shape, v.shape + v.ndim, 0) != v.shape + v.ndim) return true;
  return v.data && reinterpret_cast<uintptr_t>(v.data) % item == 0;
}

inline bool read_numpy(nb::handle h, View& v) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(h.ptr(), &buffer, PyBUF_STRIDES | PyBUF_FORMAT)) {
    PyErr_Clear();
    return false;
  }
  const auto item = buffer.itemsize;
  if (buffer.ndim <= 3 && buffer.format[1] == '\0') v.items = items_of(buffer.format[0], item);
  bool good = v.items != Items::none;
  for (v.ndim = 0; good && v.ndim < buffer.ndim; ++v.ndim) {
    v.shape[v.ndim] = buffer.shape[v.ndim];
    v.stride[v.ndim] = buffer.strides[v.ndim] / item;
    good = buffer.strides[v.ndim] % item == 0;
  }
  v.data = buffer.buf;
  // The caller holds the array, and with it the memory, until the call returns.
  PyBuffer_Release(&buffer);
  return good && readable(v, item);
}

inline bool read_tensor(const Torch& torch, nb::handle h, View& v) {
  nb::dlpack::dltensor t;
  if (torch.api->borrow(h.ptr(), &t)) {
    PyErr_Clear();
    return false;
  }
  if (t.device.device_type != nb::device::cpu::value || t.ndim > 3) return false;
  v.items = items_of(t.dtype);
  if (v.items == Items::none) return false;
  v.data = static_cast<const char*>(t.data) + t.byte_offset;
  v.ndim = t.ndim;
  std::copy_n(t.shape, t.ndim, v.shape);
  std::copy_n(t.strides, t.ndim, v.stride);
  // A lazily negated tensor holds the negatives of its values.
  return readable(v, t.dtype.bits / 8) && h.attr("is_neg")().ptr() == Py_False;
}

}  // namespace draftproof
