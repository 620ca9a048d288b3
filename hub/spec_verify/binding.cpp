// The border to torch's stable ABI: the only text that knows it. Arguments are those that the checks let through, in
// their working dtypes; results go into tensors of the caller.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "levels.h"
#include "threads.h"

using namespace draftproof;

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Given = std::optional<Tensor>;

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// [B, N, V]
Rows rows(const Tensor& t) {
  Rows r;
  switch (t.scalar_type()) {
    case ScalarType::Half: r.dtype = DType::f16; break;
    case ScalarType::BFloat16: r.dtype = DType::bf16; break;
    case ScalarType::Double: r.dtype = DType::f64; break;
    default: r.dtype = DType::f32;
  }
  r.data = t.data_ptr();
  r.vocab = t.size(2);
  r.batch_stride = t.stride(0);
  r.position_stride = t.stride(1);
  r.stride = t.stride(2);
  return r;
}

// [B]
Column<int64_t> column(const Given& t, int64_t otherwise) {
  if (!t) return {nullptr, 0, otherwise};
  return {data<int64_t>(*t), t->stride(0), 0};
}

// [B, L] as a contiguous copy: a rule comes back to what it has looked at.
template <class T>
std::vector<T> copied(const Tensor& t) {
  std::vector<T> own;
  own.reserve(t.numel());
  for (int64_t i = 0; i < t.size(0); ++i)
    for (int64_t j = 0; j < t.size(1); ++j) own.push_back(data<T>(t)[i * t.stride(0) + j * t.stride(1)]);
  return own;
}

Rule rule_named(const std::string& name) {
  if (name == "block") return Rule::block;
  if (name == "match") return Rule::match;
  return name == "greedy" ? Rule::greedy : Rule::token;
}

void verify_rows(std::string rule, bool probabilities, Tensor target, Given draft, Tensor draft_tokens,
                 Given uniform_accept, Given uniform_sample, Given seed, Given offset, Given count, Given eos,
                 Tensor num_accepted, Tensor next_token, Tensor tokens, Tensor num_emitted, Tensor eos_hit,
                 Tensor status) {
  VerifyBatch batch;
  batch.batch = draft_tokens.size(0);
  batch.drafted = draft_tokens.size(1);
  batch.rule = rule_named(rule);
  batch.from_probabilities = probabilities;
  batch.target = rows(target);
  if (draft) batch.draft = rows(*draft);
  batch.filters = {{nullptr, 0, 1.0f}, {nullptr, 0, 1.0f}, {}, {nullptr, 0, 1.0f},
                   {nullptr, 0, FilterInput::kMaxVocabulary}};
  batch.draft_filters = batch.filters;
  const std::vector<int64_t> drafts = copied<int64_t>(draft_tokens);
  batch.draft_tokens = {drafts.data(), batch.drafted, batch.drafted, 1};
  const std::vector<float> accept = uniform_accept ? copied<float>(*uniform_accept) : std::vector<float>();
  const std::vector<float> sample = uniform_sample ? copied<float>(*uniform_sample) : std::vector<float>();
  if (uniform_accept) batch.uniform_accept = accept.data();
  if (uniform_sample) batch.uniform_sample = sample.data();
  batch.seed = column(seed, 0);
  batch.offset = column(offset, 0);
  batch.num_draft_tokens = column(count, batch.drafted);
  if (eos) batch.eos = {data<int64_t>(*eos), eos->size(1), eos->stride(0), eos->stride(1)};
  batch.num_accepted = data<int64_t>(num_accepted);
  batch.next_token = data<int64_t>(next_token);
  batch.tokens = data<int64_t>(tokens);
  batch.num_emitted = data<int64_t>(num_emitted);
  batch.eos_hit = data<bool>(eos_hit);
  batch.status = data<int32_t>(status);
  const Level& level = active_level();
  parallel_rows(batch.batch, 1, [&](int64_t first, int64_t last) { level.verify(batch, first, last); });
}

std::string levels() {
  std::string names;
  for (const Level* level : available_levels()) names += std::string(level->name) + ' ';
  return names;
}

std::string level() { return active_level().name; }

}  // namespace

// One more step, so that the name is expanded.
#define DRAFTPROOF_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define DRAFTPROOF_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
#define DRAFTPROOF_JOIN_(a, b) a##b
#define DRAFTPROOF_JOIN(a, b) DRAFTPROOF_JOIN_(a, b)
#define DRAFTPROOF_TEXT_(a) #a
#define DRAFTPROOF_TEXT(a) DRAFTPROOF_TEXT_(a)

DRAFTPROOF_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "verify_rows(str rule, bool probabilities, Tensor target, Tensor? draft, Tensor draft_tokens,"
      " Tensor? uniform_accept, Tensor? uniform_sample, Tensor? seed, Tensor? offset, Tensor? count, Tensor? eos,"
      " Tensor(a!) num_accepted, Tensor(b!) next_token, Tensor(c!) tokens, Tensor(d!) num_emitted,"
      " Tensor(e!) eos_hit, Tensor(f!) status) -> ()");
  m.def("levels() -> str");
  m.def("level() -> str");
  m.def("set_level(str name) -> bool");
}

DRAFTPROOF_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
  m.impl("verify_rows", TORCH_BOX(&verify_rows));
  m.impl("levels", TORCH_BOX(&levels));
  m.impl("level", TORCH_BOX(&level));
  m.impl("set_level", TORCH_BOX(&set_level));
}

PyMODINIT_FUNC DRAFTPROOF_JOIN(PyInit_, TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, DRAFTPROOF_TEXT(TORCH_EXTENSION_NAME), nullptr, 0, nullptr,
                               nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
