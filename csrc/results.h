// Results of a call: new arrays of the rows' library. Part of bindings.cpp.
#pragma once

#include <initializer_list>
#include <memory>
#include <new>
#include <vector>

#include "arguments.h"

namespace draftproof {

// New arrays of the rows' library, for the core to write to.
class Results {
 public:
  explicit Results(const Arguments& arguments) : torch_(arguments.torch()) {}

  int64_t* int64(std::initializer_list<int64_t> shape) {
    return add<int64_t>(shape, Numpy::get().int64, nb::dlpack::dtype_code::Int);
  }
  int32_t* int32(std::initializer_list<int64_t> shape) {
    return add<int32_t>(shape, Numpy::get().int32, nb::dlpack::dtype_code::Int);
  }
  float* float32(std::initializer_list<int64_t> shape) {
    return add<float>(shape, Numpy::get().float32, nb::dlpack::dtype_code::Float);
  }
  // Status [B], an array only where the caller looks at it: making one costs a tenth of a small call.
  int32_t* status(int64_t batch, bool unseen) {
    if (!unseen) return int32({batch});
    unseen_.resize(batch);
    return unseen_.data();
  }
  bool* boolean(std::initializer_list<int64_t> shape) {
    return add<bool>(shape, Numpy::get().boolean, nb::dlpack::dtype_code::Bool);
  }

  nb::object tuple() const {
    const nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(arrays_.size())));
    if (!made) nb::raise_python_error();
    for (size_t i = 0; i < arrays_.size(); ++i)
      PyTuple_SetItem(made.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(arrays_[i].ptr()));
    return made;
  }

 private:
  const Torch* torch_;
  std::vector<nb::object> arrays_;
  std::vector<int32_t> unseen_;

  struct Owner {
    ManagedTensor managed;
    int64_t shape[2], strides[2];
    std::unique_ptr<char[]> memory;
  };

  template <class T>
  T* add(std::initializer_list<int64_t> shape, PyObject* dtype, nb::dlpack::dtype_code code) {
    int64_t size = sizeof(T);
    for (const int64_t n : shape) {
      if (n > 0 && size > kLargest / n) throw std::bad_alloc();
      size *= n;
    }
    void* data = torch_ ? tensor(shape, size, code, 8 * sizeof(T)) : numpy(shape, dtype);
    return static_cast<T*>(data);
  }

  void* numpy(std::initializer_list<int64_t> shape, PyObject* dtype) {
    const auto given = shape.begin();
    const nb::object sizes = shape.size() == 1 ? nb::object(nb::int_(given[0])) : nb::make_tuple(given[0], given[1]);
    nb::object array = nb::handle(Numpy::get().empty)(sizes, nb::handle(dtype));
    Py_buffer buffer;
    if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_WRITABLE)) nb::raise_python_error();
    void* data = buffer.buf;
    PyBuffer_Release(&buffer);
    arrays_.push_back(std::move(array));
    return data;
  }

  void* tensor(std::initializer_list<int64_t> shape, int64_t size, nb::dlpack::dtype_code code, size_t bits) {
    auto owner = std::make_unique<Owner>();
    owner->memory.reset(new char[size]);
    std::copy(shape.begin(), shape.end(), owner->shape);
    owner->strides[shape.size() - 1] = 1;
    if (shape.size() == 2) owner->strides[0] = owner->shape[1];
    owner->managed = {1, 0, owner.get(), [](ManagedTensor* m) { delete static_cast<Owner*>(m->context); }, 0,
                      {owner->memory.get(), {nb::device::cpu::value, 0}, static_cast<int32_t>(shape.size()),
                       {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1}, owner->shape, owner->strides, 0}};
    void* data = owner->memory.get();
    void* made = nullptr;
    if (torch_->api->from_managed(&owner.release()->managed, &made)) nb::raise_python_error();
    arrays_.push_back(nb::steal(static_cast<PyObject*>(made)));
    return data;
  }
};

}  // namespace draftproof
