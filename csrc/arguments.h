// Arguments of a call, taken only where they are surely valid. Part of bindings.cpp.
#pragma once

#include <cfloat>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "crossing.h"
#include "operations.h"
#include "philox.h"

namespace draftproof {

struct Range {
  double low, high, off;
};
constexpr Range kTemperature{0.0, FLT_MAX, 1.0}, kTopP{0.0, 1.0, 1.0}, kMinP{0.0, 1.0, 0.0},
    kPenalty{0x1p-149, FLT_MAX, 1.0};  // what float32 rounds to 0 is out
constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

// Reads the arguments of one call, and takes only what is surely valid: numbers of exact types and within their range,
// arrays of the rows' library that can be read in place. At the first other one `plain` turns false, and the call is
// for the full path, which mends the argument or says what is wrong with it.
class Arguments {
 public:
  bool plain = true;

  explicit Arguments(nb::handle rows) : torch_(is_numpy(rows) ? nullptr : Torch::get()) {}

  const Torch* torch() const { return torch_; }
  int64_t batch() const { return batch_; }
  int64_t positions() const { return positions_; }

  // The rows that set the batch: [B, V], or [B, N, V].
  Rows first_rows(nb::handle h, int ndim) {
    const View v = array(h);
    batch_ = v.shape[0];
    positions_ = ndim == 3 ? v.shape[1] : 1;
    return rows(v, {batch_, positions_}, ndim);
  }
  Rows more_rows(nb::handle h, int64_t positions) { return rows(array(h), {batch_, positions}, 3); }

  // Hang a mask over rows: bool of the shape of the rows, or 32 ids to an int32. `vocab` may be less than the rows'.
  void mask(nb::handle h, Rows& rows, std::initializer_list<int64_t> leading, int64_t vocab) {
    if (h.is_none()) return;
    const View v = array(h);
    const int last = static_cast<int>(leading.size());
    rows.mask_kind = v.items == Items::boolean ? MaskKind::bytes : MaskKind::bits;
    require(v.items == Items::boolean || v.items == Items::i32);
    require(v.ndim == last + 1 && std::equal(leading.begin(), leading.end(), v.shape));
    require(v.shape[last] == (rows.mask_kind == MaskKind::bytes ? vocab : (vocab + 31) / 32));
    rows.mask = v.data;
    rows.mask_vocab = vocab;
    rows.mask_batch_stride = v.stride[0];
    rows.mask_position_stride = last == 2 ? v.stride[1] : 0;
    rows.mask_stride = v.stride[last];
  }

  Filters filters(nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p, nb::handle penalty) {
    return {numbers(temperature, kTemperature), numbers(top_p, kTopP), numbers(min_p, kMinP),
            numbers(penalty, kPenalty), top_ks(top_k)};
  }

  Column<int64_t> offsets(nb::handle h, int64_t drafted) { return integers(h, 0, kLargest - drafted); }
  Column<int64_t> draft_index(nb::handle h) {
    if (h.is_none()) return {nullptr, 0, -1};
    return integers(h, 0, (int64_t{1} << 24) - 1);
  }
  Column<int64_t> draft_lengths(nb::handle h, int64_t drafted) {
    if (h.is_none()) return {nullptr, 0, drafted};
    return integers(h, 0, drafted);
  }

  // Seeds [B], or one whose rows' own are derived here.
  Column<int64_t> seeds(nb::handle h) {
    int64_t seed;
    if (!integer(h, seed, true)) {
      const View v = per_row(h, true);
      require(v.items == Items::i64 || v.items == Items::u64);
      return {static_cast<const int64_t*>(v.data), v.stride[0], 0};
    }
    if (!plain || batch_ <= 1) return {nullptr, 0, seed};
    int64_t* own = keep<int64_t>(batch_);
    own[0] = seed;
    for (int64_t i = 1; i < batch_; ++i) {
      const Words w = philox(Stream(static_cast<uint64_t>(seed), 0, Purpose::row_seed, 0), static_cast<uint32_t>(i));
      own[i] = static_cast<int64_t>(static_cast<uint64_t>(w.w[1]) << 32 | w.w[0]);
    }
    return {own, 1, 0};
  }

  // Ids [B, L].
  Matrix ids(nb::handle h) {
    const View v = array(h);
    require(v.ndim == 2 && v.items == Items::i64 && v.shape[0] == batch_);
    return {static_cast<const int64_t*>(v.data), v.shape[1], v.stride[0], v.stride[1]};
  }
  // Draft tokens [B, K]: a copy, since a rule comes back to an id that it has looked at.
  Matrix drafts(nb::handle h) {
    const Matrix given = ids(h);
    if (!plain) return {};
    int64_t* own = keep<int64_t>(batch_, given.columns);
    for (int64_t i = 0; i < batch_; ++i)
      for (int64_t j = 0; j < given.columns; ++j)
        own[i * given.columns + j] = given.data[i * given.row_stride + j * given.column_stride];
    return {own, given.columns, given.columns, 1};
  }
  Matrix history(nb::handle h) { return h.is_none() ? Matrix{} : ids(h); }

  // An int, a list of ints or [E], the same for each row, or [B, E].
  Matrix eos(nb::handle h) {
    if (h.is_none()) return {};
    if (PyList_CheckExact(h.ptr()) || PyTuple_CheckExact(h.ptr())) {
      const nb::tuple listed(nb::borrow(h));
      int64_t* own = keep<int64_t>(static_cast<int64_t>(listed.size()));
      for (size_t i = 0; i < listed.size(); ++i) require(integer(listed[i], own[i]));
      return {own, static_cast<int64_t>(listed.size()), 0, 1};
    }
    int64_t id;
    if (integer(h, id)) {
      int64_t* own = keep<int64_t>(1);
      *own = id;
      return {own, 1, 0, 1};
    }
    const View v = array(h);
    require(v.items == Items::i64 && (v.ndim == 1 || (v.ndim == 2 && v.shape[0] == batch_)));
    const int last = v.ndim == 1 ? 0 : 1;
    return {static_cast<const int64_t*>(v.data), v.shape[last], last ? v.stride[0] : 0, v.stride[last]};
  }

  // Uniforms [B, columns], rounded to float32 and brought below 1.
  const float* uniforms(nb::handle h, int64_t columns) {
    if (h.is_none()) return nullptr;
    const View v = array(h);
    require(v.ndim == 2 && v.shape[0] == batch_ && v.shape[1] == columns);
    require(v.items == Items::f32 || v.items == Items::f64);
    if (!plain) return nullptr;
    float* own = keep<float>(batch_, columns);
    for (int64_t i = 0; plain && i < batch_; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const float u = real(v, i * v.stride[0] + j * v.stride[1]);
        require(u >= 0.0f && u <= 1.0f);
        own[i * columns + j] = std::min(u, 1.0f - 0x1p-24f);
      }
    return own;
  }

  Rule rule(nb::handle h) {
    constexpr const char* names[] = {"token", "block", "match", "greedy"};
    if (PyUnicode_Check(h.ptr()))
      for (int i = 0; i < 4; ++i)
        if (PyUnicode_CompareWithASCIIString(h.ptr(), names[i]) == 0) return static_cast<Rule>(i);
    plain = false;
    return Rule::token;
  }

  // Whether a dead row is for the full path to raise for.
  bool raises(nb::handle check) {
    require(check.is_none() || PyBool_Check(check.ptr()));
    return check.ptr() != Py_False;
  }

  void require(bool condition) { plain = plain && condition; }

 private:
  const Torch* torch_;
  int64_t batch_ = 0, positions_ = 0;
  std::vector<std::unique_ptr<char[]>> kept_;

  template <class T>
  T* keep(int64_t rows, int64_t columns = 1) {
    if (columns > 0 && rows > kLargest / static_cast<int64_t>(sizeof(T)) / columns) throw std::bad_alloc();
    kept_.emplace_back(new char[rows * columns * sizeof(T)]);
    return reinterpret_cast<T*>(kept_.back().get());
  }

  // A Python int of 64 bits; with `wrap` those from 2**63 on stand for negative ones.
  static bool integer(nb::handle h, int64_t& value, bool wrap = false) {
    if (!PyLong_CheckExact(h.ptr())) return false;
    int overflow = 0;
    value = PyLong_AsLongLongAndOverflow(h.ptr(), &overflow);
    if (overflow > 0 && wrap) {
      value = static_cast<int64_t>(PyLong_AsUnsignedLongLong(h.ptr()));
      if (!PyErr_Occurred()) return true;
      PyErr_Clear();
    }
    return overflow == 0;
  }

  static bool number(nb::handle h, double& value) {
    if (PyFloat_CheckExact(h.ptr())) {
      value = PyFloat_AsDouble(h.ptr());
      return true;
    }
    int64_t whole;
    if (!integer(h, whole)) return false;
    value = static_cast<double>(whole);
    return true;
  }

  Column<float> numbers(nb::handle h, const Range& range) {
    double value;
    if (h.is_none()) return {nullptr, 0, static_cast<float>(range.off)};
    if (number(h, value)) {
      // The full path rounds a number while the caller's flush-to-zero still holds: what it may flush is for it to say.
      require(value >= range.low && value <= range.high && (value == 0.0 || value >= FLT_MIN));
      return {nullptr, 0, static_cast<float>(value)};
    }
    const View v = per_row(h);
    require(v.items == Items::f32 || v.items == Items::f64);
    return column<float>(v, range.low, range.high, [&](int64_t i) { return real(v, i); });
  }

  Column<int64_t> top_ks(nb::handle h) {
    static constexpr int64_t most = FilterInput::kMaxVocabulary;
    if (h.is_none()) return {nullptr, 0, most};
    return integers(h, -1, kLargest, [](int64_t k) { return k <= 0 ? most : std::min(k, most); });
  }

  // Integers within bounds, as `held` maps them.
  template <class F = std::identity>
  Column<int64_t> integers(nb::handle h, int64_t low, int64_t high, F held = {}) {
    int64_t number;
    if (integer(h, number)) {
      require(number >= low && number <= high);
      return {nullptr, 0, held(number)};
    }
    const View v = per_row(h);
    require(v.items == Items::i64);
    const auto read = [&](int64_t i) { return static_cast<const int64_t*>(v.data)[i]; };
    return column<int64_t>(v, low, high, read, held);
  }

  // Checked values are copied: another thread may write to the array afterwards. One row that stands for all stays one.
  template <class T, class Bound, class Read, class Held = std::identity>
  Column<T> column(const View& v, Bound low, Bound high, Read read, Held held = {}) {
    if (!plain) return {};
    const int64_t different = v.stride[0] == 0 ? std::min<int64_t>(batch_, 1) : batch_;
    T* own = keep<T>(different);
    for (int64_t i = 0; plain && i < different; ++i) {
      const T value = read(i * v.stride[0]);
      require(value >= low && value <= high);
      own[i] = held(value);
    }
    return {own, v.stride[0] == 0 ? 0 : 1, T{}};
  }

  static float real(const View& v, int64_t i) {
    return v.items == Items::f32 ? static_cast<const float*>(v.data)[i]
                                 : static_cast<float>(static_cast<const double*>(v.data)[i]);
  }

  Rows rows(const View& v, std::initializer_list<int64_t> leading, int ndim) {
    const int last = ndim - 1;
    Rows r;
    require(v.ndim == ndim && std::equal(leading.begin(), leading.begin() + last, v.shape));
    require(v.shape[last] > 0 && v.shape[last] <= FilterInput::kMaxVocabulary);
    switch (v.items) {
      case Items::f16: r.dtype = DType::f16; break;
      case Items::bf16: r.dtype = DType::bf16; break;
      case Items::f32: r.dtype = DType::f32; break;
      case Items::f64: r.dtype = DType::f64; break;
      default: plain = false;
    }
    r.data = v.data;
    r.vocab = v.shape[last];
    r.batch_stride = v.stride[0];
    r.position_stride = last == 2 ? v.stride[1] : 0;
    r.stride = v.stride[last];
    return r;
  }

  View per_row(nb::handle h, bool numpy_too = false) {
    const View v = array(h, numpy_too);
    require(v.ndim == 1 && v.shape[0] == batch_);
    return v;
  }

  View array(nb::handle h, bool numpy_too = false) {
    View v;
    if (!plain) return v;
    plain = torch_ && is_tensor(*torch_, h)         ? read_tensor(*torch_, h, v)
            : (!torch_ || numpy_too) && is_numpy(h) ? read_numpy(h, v)
                                                    : false;
    return v;
  }
};

}  // namespace draftproof
