// Batches of rows, parameters and ids from a fuzzer's bytes, each in several forms that must not make a difference.
#pragma once

#include <bit>
#include <cmath>
#include <limits>

#include "operations.h"
#include "layout.h"
#include "plain.h"

namespace fuzz {

using namespace draftproof;
using plain::kInfinity;
constexpr float kFltMax = std::numeric_limits<float>::max();

// As given: any dtype, any strides. Packed: contiguous, the other kind of mask. Widened: contiguous float32.
enum class Form { given, packed, widened };

// --- columns and ids --------------------------------------------------------------------------------------------------

// One value a row, or one for all.
template <class T>
struct PerRow {
  std::vector<T> values;
  T first{};
  bool scalar = false;
  Laid laid;

  T operator[](int64_t i) const { return values[i]; }
  Column<T> column() const {
    if (scalar) return {nullptr, 0, first};
    return {static_cast<const T*>(laid.data), laid.strides[0], T{}};
  }
};

template <class T, class Make>
PerRow<T> per_row(Bytes& bytes, int64_t batch, Make make) {
  PerRow<T> column;
  column.scalar = bytes.chance(128);
  column.first = make();
  for (int64_t i = 0; i < batch; ++i) column.values.push_back(column.scalar || i == 0 ? column.first : make());
  if (!column.scalar) column.laid = lay(bytes, column.values, {batch, 1, 1});
  return column;
}

struct IdTable {
  int64_t columns = 0;
  std::vector<int64_t> ids;
  Laid laid;

  Matrix matrix() const {
    return {static_cast<const int64_t*>(laid.data), columns, laid.strides[0], laid.strides[1]};
  }
  std::vector<int64_t> row(int64_t i) const {
    return {ids.begin() + i * columns, ids.begin() + (i + 1) * columns};
  }
};

inline int64_t any_id(Bytes& bytes, int64_t vocab) {
  if (!bytes.chance(32)) return bytes.below(vocab);
  return bytes.pick<int64_t>({-1, -1, -2, vocab, vocab - 1, vocab + 63, int64_t{1} << 31, int64_t{1} << 62, INT64_MIN, INT64_MAX});
}

inline IdTable ids(Bytes& bytes, int64_t batch, int64_t columns, int64_t vocab) {
  IdTable table{columns, {}, {}};
  for (int64_t i = 0; i < batch * columns; ++i) table.ids.push_back(any_id(bytes, vocab));
  table.laid = lay(bytes, table.ids, {batch, columns, 1});
  return table;
}

// --- rows -------------------------------------------------------------------------------------------------------------

inline float value_of_half(uint16_t h) {
  const int e = h >> 10 & 31, f = h & 1023;
  const float magnitude = e == 31 ? (f ? std::nanf("") : kInfinity) : std::ldexp(e ? 1024.0f + f : f, (e ? e : 1) - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}

// The largest half not above the magnitude; it matters only that every half can come out.
inline uint16_t half_of(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = bits >> 16 & 0x8000;
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7E01;
  if (magnitude == kInfinity) return sign | 0x7C00;
  if (magnitude >= 65504.0f) return sign | 0x7BFF;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(magnitude * 0x1p24f);
  return sign | static_cast<uint16_t>(((bits & 0x7FFFFFFF) - 0x38000000) >> 13);
}

struct RowsInput {
  Shape shape{};  // batch, positions, vocabulary
  DType dtype = DType::f32;
  std::vector<float> values;  // what the items say
  std::vector<double> doubles;
  std::vector<uint16_t> halves;
  Laid laid, tight, floats;

  MaskKind kind = MaskKind::none;
  int64_t mask_vocab = 0;
  std::vector<uint8_t> allowed;  // empty: no mask
  Laid bytes_given, bytes_tight, bits_given, bits_tight;

  std::vector<float> row(int64_t i, int64_t position) const {
    const auto start = values.begin() + (i * shape[1] + position) * shape[2];
    return {start, start + shape[2]};
  }
  std::vector<uint8_t> mask(int64_t i, int64_t position) const {
    if (kind == MaskKind::none) return {};
    const auto start = allowed.begin() + (i * shape[1] + position) * mask_vocab;
    return {start, start + mask_vocab};
  }

  Rows rows(Form form) const {
    Rows r;
    const Laid& at = form == Form::given ? laid : form == Form::packed ? tight : floats;
    r.data = at.data;
    r.dtype = form == Form::widened ? DType::f32 : dtype;
    r.vocab = shape[2];
    r.batch_stride = at.strides[0];
    r.position_stride = at.strides[1];
    r.stride = at.strides[2];
    if (kind == MaskKind::none) return r;
    const bool as_bytes = (kind == MaskKind::bytes) != (form == Form::packed);
    const Laid& m = as_bytes ? (form == Form::given ? bytes_given : bytes_tight)
                             : (form == Form::given ? bits_given : bits_tight);
    r.mask_kind = as_bytes ? MaskKind::bytes : MaskKind::bits;
    r.mask = m.data;
    r.mask_vocab = mask_vocab;
    r.mask_batch_stride = m.strides[0];
    r.mask_position_stride = m.strides[1];
    r.mask_stride = m.strides[2];
    return r;
  }
};

// Mostly small, now and then wide where there are few rows.
inline int64_t vocabulary(Bytes& bytes, int64_t rows) {
  const int64_t kind = bytes.take(1), most = std::max<int64_t>(300, 6000 / std::max<int64_t>(rows, 1));
  if (kind < 112) return 1 + kind % 16;
  if (kind < 208) return 1 + bytes.below(300);
  if (kind < 248) return std::min(most, 64 * (1 + bytes.below(24)) + bytes.pick<int64_t>({-1, 0, 1, 17}));
  return 1 + bytes.below(most);
}

inline float any_float(Bytes& bytes) { return std::bit_cast<float>(static_cast<uint32_t>(bytes.take(4))); }

// A palette of values spread at random, a stretch of raw bits, or smooth values; then some of them replaced.
inline std::vector<float> any_values(Bytes& bytes, int64_t size, bool probabilities) {
  std::vector<float> values(size);
  const int64_t kind = bytes.below(8);
  Random random(bytes.take(4));
  if (kind < 2) {
    const int64_t raw = std::min<int64_t>(size, 64);
    for (int64_t i = 0; i < size; ++i) values[i] = i < raw ? any_float(bytes) : values[random.below(raw)];
  } else if (kind < 4) {
    float palette[8];
    for (float& x : palette)
      x = bytes.chance(128) ? static_cast<float>(static_cast<int8_t>(bytes.take(1))) * 0.25f
                            : bytes.pick({0.0f, -0.0f, kInfinity, -kInfinity, kFltMax, -kFltMax, 1e-45f, -1e-45f,
                                          0x1p-126f, 1e30f, -27.7f, -27.8f, 88.7f, 65504.0f});
    const int64_t used = 1 + bytes.below(8);
    for (float& x : values) x = palette[random.below(used)];
  } else {
    const float scale = bytes.pick({1.0f, 3.0f, 0.01f, 30.0f, 1e-6f, 3e-4f, 1e36f, 1e-42f});
    const float shift = bytes.pick({0.0f, 0.0f, 0.0f, 20.0f, 1000.0f, -1000.0f});
    const bool peaked = bytes.chance(64), rounded = bytes.chance(64);
    for (float& x : values) {
      double u = random.unit() + random.unit() + random.unit() - 1.5;
      if (peaked) u = -std::fabs(u * u * u) * 8;
      x = static_cast<float>((rounded ? std::round(u * 4) : u) * scale) + shift;
    }
  }
  if (bytes.chance(32)) {  // about one in each block stands out
    const float by = bytes.pick({1.0f, 10.0f, 1e7f, 1e30f, 2e38f, -1e7f});
    for (int64_t i = bytes.below(64); i < size; i += 64) values[i] += by * static_cast<float>(1.0 + random.unit());
  }
  if (probabilities && !bytes.chance(16))
    for (float& x : values) x = std::isnan(x) || std::isinf(x) ? 0.0f : std::fabs(x);
  const float least = probabilities ? 0.0f : -kInfinity;
  if (const int64_t share = bytes.pick<int64_t>({0, 0, 0, 64, 128, 250, 255}))
    for (float& x : values)
      if (random.below(256) < share) x = least;
  const int64_t odd = bytes.below(64);
  if (odd < 4 && size > 0)
    values[random.below(size)] = odd == 0 ? std::nanf("") : odd == 1 ? kInfinity : odd == 2 ? -kInfinity : -0x1p-149f;
  return values;
}

inline void repeat_axis(std::vector<float>& values, const Shape& shape, int axis) {
  for (int64_t i = 0; i < shape[0]; ++i)
    for (int64_t j = 0; j < shape[1]; ++j) {
      const int64_t from = (axis == 0 ? 0 : i) * shape[1] + (axis == 1 ? 0 : j);
      const auto to = values.begin() + (i * shape[1] + j) * shape[2];
      if (from != i * shape[1] + j) std::copy_n(values.begin() + from * shape[2], shape[2], to);
    }
}

inline void encode(RowsInput& rows) {
  for (float& x : rows.values) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (rows.dtype == DType::f64) {
      const double exact = x;
      rows.doubles.push_back(bits & 1 || std::isinf(x) ? exact : std::nextafter(exact, -kInfinity));
      x = static_cast<float>(rows.doubles.back());
    } else if (rows.dtype == DType::f16) {
      rows.halves.push_back(half_of(x));
      x = value_of_half(rows.halves.back());
    } else if (rows.dtype == DType::bf16) {
      rows.halves.push_back(std::isnan(x) ? 0x7FC0 : bits >> 16);
      x = std::bit_cast<float>(static_cast<uint32_t>(rows.halves.back()) << 16);
    }
  }
}

inline void add_mask(Bytes& bytes, RowsInput& rows, int64_t mask_vocab) {
  const int64_t share = bytes.pick<int64_t>({255, 250, 128, 8, 1});
  Random random(bytes.take(4));
  const Shape shape = {rows.shape[0], rows.shape[1], mask_vocab};
  const Shape words = {shape[0], shape[1], (mask_vocab + 31) / 32};
  rows.kind = bytes.chance(128) ? MaskKind::bytes : MaskKind::bits;
  rows.mask_vocab = mask_vocab;
  std::vector<int32_t> packed(count(words));
  for (auto& word : packed) word = static_cast<int32_t>(random.bits());  // bits beyond the vocabulary say nothing
  for (int64_t i = 0; i < count(shape); ++i) {
    const bool allowed = random.below(256) < share;
    const int64_t row = i / mask_vocab, id = i % mask_vocab;
    int32_t& word = packed[row * words[2] + (id >> 5)];
    word = static_cast<int32_t>((static_cast<uint32_t>(word) & ~(1u << (id & 31))) | uint32_t{allowed} << (id & 31));
    rows.allowed.push_back(allowed ? 1 : 0);
  }
  rows.bytes_given = lay(bytes, rows.allowed, shape);
  rows.bytes_tight = contiguous(rows.allowed, shape);
  rows.bits_given = lay(bytes, packed, words);
  rows.bits_tight = contiguous(packed, words);
}

inline RowsInput any_rows(Bytes& bytes, const Shape& shape, bool probabilities) {
  RowsInput rows;
  rows.shape = shape;
  rows.dtype = bytes.pick({DType::f32, DType::f32, DType::f32, DType::bf16, DType::f16, DType::f64});
  rows.values = any_values(bytes, count(shape), probabilities);
  std::array<bool, 3> repeats{};
  if (const int64_t axis = bytes.below(8); axis < 2) {
    repeat_axis(rows.values, shape, static_cast<int>(axis));
    repeats[axis] = true;
  }
  encode(rows);
  const auto place = [&](const auto& items) {
    rows.laid = lay(bytes, items, shape, repeats);
    rows.tight = contiguous(items, shape);
  };
  if (rows.dtype == DType::f32) place(rows.values);
  else if (rows.dtype == DType::f64) place(rows.doubles);
  else place(rows.halves);
  rows.floats = contiguous(rows.values, shape);
  return rows;
}

// Ids that are the largest of their block of 64, where a penalty moves what bounds the block.
inline void aim_at_maxima(Bytes& bytes, IdTable& table, const RowsInput& rows) {
  if (!bytes.chance(96)) return;
  for (size_t k = 0; k < table.ids.size(); ++k) {
    if (bytes.chance(64)) continue;
    const auto row = rows.row(static_cast<int64_t>(k) / table.columns, 0);
    const int64_t vocab = static_cast<int64_t>(row.size()), start = 64 * bytes.below((vocab + 63) / 64);
    const auto end = row.begin() + std::min(vocab, start + 64);
    table.ids[k] = std::max_element(row.begin() + start, end) - row.begin();
  }
  table.laid = lay(bytes, table.ids, {rows.shape[0], table.columns, 1});
}

// --- parameters -------------------------------------------------------------------------------------------------------

struct FiltersInput {
  PerRow<float> temperature, top_p, min_p, penalty;
  PerRow<int64_t> top_k;

  Filters filters() const {
    return {temperature.column(), top_p.column(), min_p.column(), penalty.column(), top_k.column()};
  }
  plain::Filters at(int64_t i) const { return {temperature[i], top_p[i], min_p[i], penalty[i], top_k[i]}; }
};

inline float unit(Bytes& bytes) { return static_cast<float>(bytes.take(2)) * 0x1p-16f; }

inline FiltersInput any_filters(Bytes& bytes, int64_t batch, int64_t vocab) {
  const int64_t on = bytes.take(1);
  const auto column = [&](int bit, float off, auto make) {
    return per_row<float>(bytes, batch, [&] { return on >> bit & 1 ? make() : off; });
  };
  FiltersInput f;
  f.temperature = column(0, 1.0f, [&] {
    return bytes.chance(128) ? 0.01f + 4.0f * unit(bytes)
                             : bytes.pick({0.0f, 0.0f, 0.7f, 1e-8f, 1e-38f, 1e-45f, 1e38f, kFltMax, 50.0f});
  });
  f.top_p = column(1, 1.0f, [&] {
    return bytes.chance(160) ? unit(bytes)
                             : bytes.pick({0.0f, 1e-45f, 0x1p-30f, 0x1p-21f, 4.7e-7f, 0.5f, 0.9f, 0.95f, 1.0f - 0x1p-24f,
                                           1.0f - 0x1p-22f, 1.0f});
  });
  f.min_p = column(2, 0.0f, [&] {
    return bytes.chance(128) ? unit(bytes)
                             : bytes.pick({1e-45f, 1e-30f, 0x1p-40f, 9.2e-13f, 0.01f, 0.5f, 1.0f - 0x1p-24f, 1.0f});
  });
  f.penalty = column(3, 1.0f, [&] {
    return bytes.chance(128) ? 0.5f + unit(bytes)
                             : bytes.pick({0.5f, 2.0f, 1e-30f, 1e30f, 1e-7f, 1e7f, 1e-45f, kFltMax, 1.0f + 0x1p-23f, 1.0f - 0x1p-24f});
  });
  f.top_k = per_row<int64_t>(bytes, batch, [&]() -> int64_t {
    if (!(on >> 4 & 1)) return FilterInput::kMaxVocabulary;
    return bytes.chance(160) ? 1 + bytes.below(vocab)
                             : bytes.pick<int64_t>({1, 2, 3, 50, 64, vocab - 1, vocab, vocab + 1, int64_t{1} << 62}) | (vocab == 1);
  });
  return f;
}

struct StreamsInput {
  PerRow<int64_t> seed, offset;
  plain::Stream at(int64_t i, int64_t further = 0) const {
    return {static_cast<uint64_t>(seed[i]), static_cast<uint64_t>(offset[i] + further)};
  }
};

inline StreamsInput any_streams(Bytes& bytes, int64_t batch, int64_t drafted) {
  const int64_t last = INT64_MAX - drafted;
  return {per_row<int64_t>(bytes, batch, [&] { return static_cast<int64_t>(bytes.take(8)); }),
          per_row<int64_t>(bytes, batch, [&] {
            return bytes.chance(32) ? bytes.pick<int64_t>({0, last, int64_t{1} << 32, (int64_t{1} << 32) - 1})
                                    : static_cast<int64_t>(bytes.take(4));
          })};
}

}  // namespace fuzz
