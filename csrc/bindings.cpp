// The border to Python: arrays in, spans out. The only file that knows nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "arithmetic.h"
#include "levels.h"
#include "operations.h"
#include "philox.h"
#include "threads.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace nb = nanobind;
using namespace draftproof;

namespace {

using In = nb::ndarray<nb::ro, nb::device::cpu>;
using Optional = std::optional<In>;
template <class T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

// Flush-to-zero and denormals-are-zero are the caller's business outside, ours inside: off.
class IeeeScope {
#if defined(__x86_64__)
  unsigned saved_ = _mm_getcsr();

 public:
  IeeeScope() { _mm_setcsr(saved_ & ~0x8040u); }
  ~IeeeScope() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  uint64_t saved_;

 public:
  IeeeScope() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(uint64_t{1} << 24)));
  }
  ~IeeeScope() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#endif
};

template <class T>
Column<T> column(const Optional& a, T fallback) {
  if (!a) return {nullptr, 0, fallback};
  if (a->ndim() != 1 || a->dtype() != nb::dtype<T>()) throw std::invalid_argument("internal: column dtype or shape");
  return {static_cast<const T*>(a->data()), a->stride(0), fallback};
}

Matrix matrix(const Optional& a) {
  if (!a) return {};
  if (a->ndim() != 2 || a->dtype() != nb::dtype<int64_t>()) throw std::invalid_argument("internal: ids dtype or shape");
  return {static_cast<const int64_t*>(a->data()), static_cast<int64_t>(a->shape(1)), a->stride(0), a->stride(1)};
}

// `a` is [B, V] or [B, N, V]; `bfloat16` says that 16-bit integers hold bfloat16.
Rows rows(const In& a, bool bfloat16, const Optional& mask, int64_t mask_vocab) {
  Rows r;
  const size_t last = a.ndim() - 1;
  r.data = a.data();
  r.dtype = bfloat16                              ? DType::bf16
            : a.dtype() == nb::dtype<float>()     ? DType::f32
            : a.dtype() == nb::dtype<double>()    ? DType::f64
                                                  : DType::f16;
  r.vocab = static_cast<int64_t>(a.shape(last));
  r.batch_stride = a.stride(0);
  r.position_stride = last == 2 ? a.stride(1) : 0;
  r.stride = a.stride(last);
  if (mask) {
    r.mask_kind = mask->dtype() == nb::dtype<bool>() ? MaskKind::bytes : MaskKind::bits;
    r.mask = mask->data();
    r.mask_vocab = mask_vocab;
    r.mask_batch_stride = mask->stride(0);
    r.mask_position_stride = last == 2 ? mask->stride(1) : 0;
    r.mask_stride = mask->stride(last);
  }
  return r;
}

Filters filters(const Optional& temperature, const Optional& top_k, const Optional& top_p, const Optional& min_p,
                const Optional& penalty) {
  return {column<float>(temperature, 1.0f), column<float>(top_p, 1.0f), column<float>(min_p, 0.0f),
          column<float>(penalty, 1.0f), column<int64_t>(top_k, FilterInput::kMaxVocabulary)};
}

// Rows a piece of work: threads pay from about 100 us of work on.
int64_t grain(int64_t elements_a_row) { return std::max<int64_t>(1, (int64_t{1} << 17) / std::max<int64_t>(1, elements_a_row)); }

template <class Batch>
void run(const Batch& batch, void (*const Level::*operation)(const Batch&, int64_t, int64_t), int64_t elements_a_row) {
  const Level& level = active_level();
  const nb::gil_scoped_release release;
  parallel_rows(batch.batch, grain(elements_a_row), [&](int64_t first, int64_t last) {
    const IeeeScope ieee;
    (level.*operation)(batch, first, last);
  });
}

void sample(In logits, bool bfloat16, Optional temperature, Optional top_k, Optional top_p, Optional min_p,
            Optional penalty, Optional history, Optional mask, In seed, In offset, Optional draft_index,
            Out<int64_t> tokens, std::optional<Out<float>> logprobs, std::optional<Out<float>> raw_logprobs,
            std::optional<Out<int64_t>> kept, Out<int32_t> status) {
  SampleBatch batch;
  batch.batch = static_cast<int64_t>(logits.shape(0));
  batch.logits = rows(logits, bfloat16, mask, static_cast<int64_t>(logits.shape(1)));
  batch.filters = filters(temperature, top_k, top_p, min_p, penalty);
  batch.history = matrix(history);
  batch.seed = column<int64_t>(seed, 0);
  batch.offset = column<int64_t>(offset, 0);
  batch.draft_index = column<int64_t>(draft_index, -1);
  batch.tokens = tokens.data();
  batch.status = status.data();
  if (logprobs) {
    batch.mode = SampleMode::logprobs;
    batch.logprobs = logprobs->data();
    batch.raw_logprobs = raw_logprobs->data();
    batch.kept = kept->data();
  }
  run(batch, &Level::sample, batch.logits.vocab);
}

// A Python number that lies in [low, high], or None for `off`; anything else is for the checks in Python to judge.
bool read_number(nb::handle h, double low, double high, double off, double& value) {
  if (h.is_none()) {
    value = off;
    return true;
  }
  if (PyFloat_CheckExact(h.ptr())) {
    value = PyFloat_AsDouble(h.ptr());
  } else if (PyLong_CheckExact(h.ptr())) {
    value = PyLong_AsDouble(h.ptr());
    if (value == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
  } else {
    return false;
  }
  return value >= low && value <= high;
}

bool read_int(nb::handle h, int64_t low, int64_t& value) {
  if (!PyLong_CheckExact(h.ptr())) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(h.ptr(), &overflow);
  return overflow == 0 && value >= low;
}

bool aligned(const In& a) { return reinterpret_cast<uintptr_t>(a.data()) % (a.dtype().bits / 8) == 0; }

// The call most loops make: rows in memory, numbers for everything else. Returns false, having done nothing of
// consequence, where an argument is of another kind or a row is dead: the full path then says what is the matter.
bool sample_plain(nb::handle logits_given, bool bfloat16, nb::handle temperature, nb::handle top_k, nb::handle top_p,
                  nb::handle min_p, nb::handle penalty, nb::handle seed, nb::handle offset,
                  nb::handle history_given, Out<int64_t> tokens) {
  constexpr double kLargest = 3.4e38;
  double t, p, m, r;
  int64_t k = 0, s, o;
  In logits;
  Optional history;
  if (!nb::try_cast(logits_given, logits) || !nb::try_cast(history_given, history)) return false;
  if (logits.ndim() != 2 || !aligned(logits) || logits.shape(1) == 0 || logits.shape(1) > static_cast<size_t>(kMaxVocab) ||
      !read_number(temperature, 0.0, kLargest, 1.0, t) || !read_number(top_p, 0.0, 1.0, 1.0, p) ||
      !read_number(min_p, 0.0, 1.0, 0.0, m) || !read_number(penalty, 1e-37, kLargest, 1.0, r) ||
      !(top_k.is_none() || read_int(top_k, -1, k)) || !read_int(seed, std::numeric_limits<int64_t>::min(), s) ||
      !read_int(offset, 0, o))
    return false;
  if (history && (history->ndim() != 2 || !aligned(*history) || history->dtype() != nb::dtype<int64_t>() ||
                  history->shape(0) != logits.shape(0)))
    return false;
  const int64_t rows_given = static_cast<int64_t>(logits.shape(0));
  std::vector<int64_t> seeds(rows_given, s);
  for (int64_t i = 1; i < rows_given; ++i) {
    const Words w = philox(Stream(static_cast<uint64_t>(s), 0, Purpose::row_seed, 0), static_cast<uint32_t>(i));
    seeds[i] = static_cast<int64_t>(static_cast<uint64_t>(w.w[1]) << 32 | w.w[0]);
  }
  std::vector<int32_t> status(rows_given);
  SampleBatch batch;
  batch.batch = rows_given;
  batch.logits = rows(logits, bfloat16, std::nullopt, 0);
  batch.filters.temperature.fallback = static_cast<float>(t);
  batch.filters.top_k.fallback = k <= 0 ? FilterInput::kMaxVocabulary : std::min(k, FilterInput::kMaxVocabulary);
  batch.filters.top_p.fallback = static_cast<float>(p);
  batch.filters.min_p.fallback = static_cast<float>(m);
  batch.filters.penalty.fallback = static_cast<float>(r);
  batch.history = matrix(history);
  batch.seed = {seeds.data(), 1, 0};
  batch.offset.fallback = o;
  batch.draft_index.fallback = -1;
  batch.tokens = tokens.data();
  batch.status = status.data();
  run(batch, &Level::sample, batch.logits.vocab);
  for (const int32_t flags : status)
    if (flags & kDead) return false;
  return true;
}

void sample_probs(In probs, bool bfloat16, In seed, In offset, Out<int64_t> tokens, Out<int32_t> status) {
  SampleProbsBatch batch;
  batch.batch = static_cast<int64_t>(probs.shape(0));
  batch.probs = rows(probs, bfloat16, std::nullopt, 0);
  batch.seed = column<int64_t>(seed, 0);
  batch.offset = column<int64_t>(offset, 0);
  batch.tokens = tokens.data();
  batch.status = status.data();
  run(batch, &Level::sample_probs, batch.probs.vocab);
}

void filter_logits(In logits, bool bfloat16, Optional temperature, Optional top_k, Optional top_p, Optional min_p,
                   Optional penalty, Optional history, Optional mask, Out<float> filtered, Out<int32_t> status) {
  FilterBatch batch;
  batch.batch = static_cast<int64_t>(logits.shape(0));
  batch.logits = rows(logits, bfloat16, mask, static_cast<int64_t>(logits.shape(1)));
  batch.filters = filters(temperature, top_k, top_p, min_p, penalty);
  batch.history = matrix(history);
  batch.filtered = filtered.data();
  batch.status = status.data();
  run(batch, &Level::filter_logits, batch.logits.vocab);
}

void finish(VerifyBatch& batch, const In& target, const In& draft_tokens, const std::string& rule, const In& count,
            const Optional& eos, Out<int64_t>& num_accepted, Out<int64_t>& next_token, Out<int64_t>& tokens,
            Out<int64_t>& num_emitted, Out<bool>& eos_hit, Out<int32_t>& status) {
  batch.batch = static_cast<int64_t>(target.shape(0));
  batch.drafted = static_cast<int64_t>(draft_tokens.shape(1));
  batch.rule = rule == "token" ? Rule::token : rule == "block" ? Rule::block : rule == "match" ? Rule::match : Rule::greedy;
  batch.draft_tokens = matrix(draft_tokens);
  batch.num_draft_tokens = column<int64_t>(count, 0);
  batch.eos = matrix(eos);
  batch.num_accepted = num_accepted.data();
  batch.next_token = next_token.data();
  batch.tokens = tokens.data();
  batch.num_emitted = num_emitted.data();
  batch.eos_hit = eos_hit.data();
  batch.status = status.data();
  run(batch, &Level::verify, batch.target.vocab * (batch.drafted + 1));
}

void verify(In target, bool target_bfloat16, Optional draft, bool draft_bfloat16, In draft_tokens, std::string rule,
            Optional temperature, Optional top_k, Optional top_p, Optional min_p, Optional penalty,
            Optional draft_temperature, Optional draft_top_k, Optional draft_top_p, Optional draft_min_p,
            Optional draft_penalty, Optional history, Optional mask, Optional draft_mask, int64_t draft_mask_vocab,
            In count, Optional eos, Optional seed, Optional offset, Out<int64_t> num_accepted, Out<int64_t> next_token,
            Out<int64_t> tokens, Out<int64_t> num_emitted, Out<bool> eos_hit, Out<int32_t> status) {
  VerifyBatch batch;
  batch.target = rows(target, target_bfloat16, mask, static_cast<int64_t>(target.shape(2)));
  if (draft) batch.draft = rows(*draft, draft_bfloat16, draft_mask, draft_mask_vocab);
  batch.filters = filters(temperature, top_k, top_p, min_p, penalty);
  batch.draft_filters = filters(draft_temperature, draft_top_k, draft_top_p, draft_min_p, draft_penalty);
  batch.history = matrix(history);
  batch.seed = column<int64_t>(seed, 0);
  batch.offset = column<int64_t>(offset, 0);
  finish(batch, target, draft_tokens, rule, count, eos, num_accepted, next_token, tokens, num_emitted, eos_hit, status);
}

void verify_probs(In target, bool target_bfloat16, Optional draft, bool draft_bfloat16, In draft_tokens,
                  std::string rule, std::optional<nb::ndarray<const float, nb::c_contig, nb::device::cpu>> accept,
                  std::optional<nb::ndarray<const float, nb::c_contig, nb::device::cpu>> emit, Optional seed,
                  Optional offset, In count, Optional eos, Out<int64_t> num_accepted, Out<int64_t> next_token,
                  Out<int64_t> tokens, Out<int64_t> num_emitted, Out<bool> eos_hit, Out<int32_t> status) {
  VerifyBatch batch;
  batch.from_probabilities = true;
  batch.target = rows(target, target_bfloat16, std::nullopt, 0);
  if (draft) batch.draft = rows(*draft, draft_bfloat16, std::nullopt, 0);
  batch.uniform_accept = accept ? accept->data() : nullptr;
  batch.uniform_sample = emit ? emit->data() : nullptr;
  batch.seed = column<int64_t>(seed, 0);
  batch.offset = column<int64_t>(offset, 0);
  finish(batch, target, draft_tokens, rule, count, eos, num_accepted, next_token, tokens, num_emitted, eos_hit, status);
}

}  // namespace

NB_MODULE(_core, m) {
  if (available_levels().empty()) throw nb::import_error("this processor is below every level the core was built for");
  m.doc() = "The C++ core. draftproof.sampling.cpu and draftproof.verification.chain.cpu call it.";
  m.def("sample", &sample, nb::arg("logits"), nb::arg("bfloat16"), nb::arg("temperature").none(), nb::arg("top_k").none(),
        nb::arg("top_p").none(), nb::arg("min_p").none(), nb::arg("repetition_penalty").none(), nb::arg("history").none(),
        nb::arg("mask").none(), nb::arg("seed"), nb::arg("offset"), nb::arg("draft_index").none(), nb::arg("tokens"),
        nb::arg("logprobs").none(), nb::arg("raw_logprobs").none(), nb::arg("kept").none(), nb::arg("status"));
  m.def("sample_plain", &sample_plain, nb::arg("logits"), nb::arg("bfloat16"), nb::arg("temperature").none(),
        nb::arg("top_k").none(), nb::arg("top_p").none(), nb::arg("min_p").none(), nb::arg("repetition_penalty").none(),
        nb::arg("seed").none(), nb::arg("offset").none(), nb::arg("history").none(), nb::arg("tokens"));
  m.def("sample_probs", &sample_probs);
  m.def("filter_logits", &filter_logits, nb::arg("logits"), nb::arg("bfloat16"), nb::arg("temperature").none(),
        nb::arg("top_k").none(), nb::arg("top_p").none(), nb::arg("min_p").none(), nb::arg("repetition_penalty").none(),
        nb::arg("history").none(), nb::arg("mask").none(), nb::arg("filtered"), nb::arg("status"));
  m.def("verify", &verify);
  m.def("verify_probs", &verify_probs);
  m.def("read", [](nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> a) {
    return active_level().read(a.data(), static_cast<int64_t>(a.size()));
  });
  m.def("set_num_threads", &set_num_threads);
  m.def("num_threads", &num_threads);
  m.def("levels", [] {
    std::vector<std::string> names;
    for (const Level* level : available_levels()) names.emplace_back(level->name);
    return names;
  });
  m.def("level", [] { return std::string(active_level().name); });
  m.def("set_level", &set_level);
}
