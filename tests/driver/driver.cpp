// Operations of the core for a Python that cannot load it, since it was compiled for another machine: requests on stdin,
// results on stdout. `plugin.py` is the other end. The argument is the level to run at, or `levels`, which lists them.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "levels.h"
#include "threads.h"

#if defined(_WIN32)
#include <fcntl.h>
#include <io.h>
#endif

using namespace draftproof;

namespace {

enum class Operation : int64_t { sample, sample_with_logprobs, sample_probs, filter_logits, verify, verify_probs };

void read(void* to, size_t bytes) {
  if (bytes > 0 && std::fread(to, bytes, 1, stdin) != 1) std::exit(0);
}

int64_t read_number() {
  int64_t number;
  read(&number, sizeof number);
  return number;
}

// An array as it lies in memory: strides in items, and where in `memory` the first item is.
struct Array {
  int64_t type = -1;  // -1: not given; DType for rows; 4 int64, 5 bool, 6 int32
  int64_t first = 0;
  std::vector<int64_t> shape, strides;
  std::vector<char> memory;

  static Array next() {
    Array a;
    a.type = read_number();
    if (a.type < 0) return a;
    a.first = read_number();
    a.shape.resize(read_number());
    a.strides.resize(a.shape.size());
    read(a.shape.data(), a.shape.size() * sizeof(int64_t));
    read(a.strides.data(), a.strides.size() * sizeof(int64_t));
    a.memory.resize(read_number());
    read(a.memory.data(), a.memory.size());
    return a;
  }
  explicit operator bool() const { return type >= 0; }
  const void* data() const { return *this ? memory.data() + first : nullptr; }
};

// The arguments of one request in the order of `sampling/cpu.py` and `verification/chain/cpu.py`, kept until it is done.
class Arguments {
 public:
  const Array& next() {
    kept_.push_back(std::make_unique<Array>(Array::next()));
    return *kept_.back();
  }
  int64_t number() { return *static_cast<const int64_t*>(next().data()); }

  template <class T>
  Column<T> column(T fallback = {}) {
    const Array& a = next();
    return {static_cast<const T*>(a.data()), a ? a.strides[0] : 0, fallback};
  }
  Matrix matrix() {
    const Array& a = next();
    if (!a) return {};
    return {static_cast<const int64_t*>(a.data()), a.shape[1], a.strides[0], a.strides[1]};
  }
  Filters filters() {
    Filters f;
    f.temperature = column<float>(1.0f);
    f.top_k = column<int64_t>(FilterInput::kMaxVocabulary);
    f.top_p = column<float>(1.0f);
    f.min_p = column<float>(0.0f);
    f.penalty = column<float>(1.0f);
    return f;
  }
  const float* floats() { return static_cast<const float*>(next().data()); }

 private:
  std::vector<std::unique_ptr<Array>> kept_;
};

// [B, V] or [B, N, V].
Rows rows(const Array& a) {
  Rows r;
  if (!a) return r;
  const bool deep = a.shape.size() == 3;
  r.data = a.data();
  r.dtype = static_cast<DType>(a.type);
  r.vocab = a.shape.back();
  r.batch_stride = a.strides[0];
  r.position_stride = deep ? a.strides[1] : 0;
  r.stride = a.strides.back();
  return r;
}

void mask(Rows& r, const Array& a, int64_t vocab) {
  if (!a || !r.data) return;
  r.mask_kind = a.type == 5 ? MaskKind::bytes : MaskKind::bits;
  r.mask = a.data();
  r.mask_vocab = vocab;
  r.mask_batch_stride = a.strides[0];
  r.mask_position_stride = a.shape.size() == 3 ? a.strides[1] : 0;
  r.mask_stride = a.strides.back();
}

class Results {
 public:
  template <class T>
  T* make(int64_t size) {
    kept_.emplace_back(size * sizeof(T), '\x5A');
    return reinterpret_cast<T*>(kept_.back().data());
  }
  void send() const {
    for (const auto& result : kept_)
      if (!result.empty()) std::fwrite(result.data(), result.size(), 1, stdout);
    std::fflush(stdout);
  }

 private:
  std::vector<std::vector<char>> kept_;
};

template <class Batch>
void run(const Batch& batch, void (*operation)(const Batch&, int64_t, int64_t)) {
  parallel_rows(batch.batch, 1, [&](int64_t first, int64_t last) { operation(batch, first, last); });
}

void sample(Arguments& given, Results& results, bool logprobs) {
  SampleBatch batch;
  const Array& logits = given.next();
  batch.batch = logits.shape[0];
  batch.logits = rows(logits);
  batch.filters = given.filters();
  batch.history = given.matrix();
  mask(batch.logits, given.next(), batch.logits.vocab);
  batch.seed = given.column<int64_t>();
  batch.offset = given.column<int64_t>();
  batch.draft_index = given.column<int64_t>(-1);
  batch.tokens = results.make<int64_t>(batch.batch);
  if (logprobs) {
    batch.mode = SampleMode::logprobs;
    batch.logprobs = results.make<float>(batch.batch);
    batch.raw_logprobs = results.make<float>(batch.batch);
    batch.kept = results.make<int64_t>(batch.batch);
  }
  batch.status = results.make<int32_t>(batch.batch);
  run(batch, active_level().sample);
}

void sample_probs(Arguments& given, Results& results) {
  SampleProbsBatch batch;
  const Array& probs = given.next();
  batch.batch = probs.shape[0];
  batch.probs = rows(probs);
  batch.seed = given.column<int64_t>();
  batch.offset = given.column<int64_t>();
  batch.tokens = results.make<int64_t>(batch.batch);
  batch.status = results.make<int32_t>(batch.batch);
  run(batch, active_level().sample_probs);
}

void filter_logits(Arguments& given, Results& results) {
  FilterBatch batch;
  const Array& logits = given.next();
  batch.batch = logits.shape[0];
  batch.logits = rows(logits);
  batch.filters = given.filters();
  batch.history = given.matrix();
  mask(batch.logits, given.next(), batch.logits.vocab);
  batch.filtered = results.make<float>(batch.batch * batch.logits.vocab);
  batch.status = results.make<int32_t>(batch.batch);
  run(batch, active_level().filter_logits);
}

void verify(Arguments& given, Results& results, bool probabilities) {
  VerifyBatch batch;
  const Array &target = given.next(), &draft = given.next();
  batch.batch = target.shape[0];
  batch.drafted = target.shape[1] - 1;
  batch.from_probabilities = probabilities;
  batch.target = rows(target);
  batch.draft = rows(draft);
  batch.draft_tokens = given.matrix();
  batch.rule = static_cast<Rule>(given.number());
  if (probabilities) {
    batch.uniform_accept = given.floats();
    batch.uniform_sample = given.floats();
  } else {
    batch.filters = given.filters();
    batch.draft_filters = given.filters();
    batch.history = given.matrix();
    const Array& shared = given.next();
    mask(batch.target, shared, batch.target.vocab);
    const Array& own = given.next();
    mask(batch.draft, own ? own : shared, own ? batch.draft.vocab : batch.target.vocab);
  }
  batch.num_draft_tokens = given.column<int64_t>();
  batch.eos = given.matrix();
  batch.seed = given.column<int64_t>();
  batch.offset = given.column<int64_t>();
  batch.num_accepted = results.make<int64_t>(batch.batch);
  batch.next_token = results.make<int64_t>(batch.batch);
  batch.tokens = results.make<int64_t>(batch.batch * (batch.drafted + 1));
  batch.num_emitted = results.make<int64_t>(batch.batch);
  batch.eos_hit = results.make<bool>(batch.batch);
  batch.status = results.make<int32_t>(batch.batch);
  run(batch, active_level().verify);
}

void serve(Operation operation) {
  Arguments given;
  Results results;
  switch (operation) {
    case Operation::sample: sample(given, results, false); break;
    case Operation::sample_with_logprobs: sample(given, results, true); break;
    case Operation::sample_probs: sample_probs(given, results); break;
    case Operation::filter_logits: filter_logits(given, results); break;
    case Operation::verify: verify(given, results, false); break;
    default: verify(given, results, true); break;
  }
  results.send();
}

}  // namespace

int main(int count, char** arguments) {
  const std::string wanted = count > 1 ? arguments[1] : "";
  if (wanted == "levels") {
    for (const Level* level : available_levels()) std::puts(level->name);
    return 0;
  }
  if (!wanted.empty() && !set_level(wanted)) return 2;
#if defined(_WIN32)
  _setmode(_fileno(stdin), _O_BINARY);
  _setmode(_fileno(stdout), _O_BINARY);
#endif
  set_num_threads(2);
  for (;;) serve(static_cast<Operation>(read_number()));
}
