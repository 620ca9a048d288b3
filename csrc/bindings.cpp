// The border to Python: an entry per operation. With the headers it is split into, the only text that knows nanobind.
//
// An entry takes arguments as the public function's caller gave them, or as the checks left them. It returns the
// operation's outputs as a tuple, or None where an argument is not surely valid or, unless `check` is False, a row is
// dead: the full path then finds out. The status of tokens, which their callers do not see, is there if `check` is False.
#include "results.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>

#include "ieee.h"
#include "levels.h"
#include "threads.h"

using namespace draftproof;

namespace {

using H = nb::handle;

// What an operation does with its rows: read them, or also form a power of two for most ids.
enum class Work { reads, powers };

// Rows a piece of work. Waking a thread takes some 30 us, and where rows are only read the memory sets the pace: a
// second thread pays from about 2^21 logits on.
int64_t grain(Work work, int64_t batch, int64_t elements_a_row) {
  const int64_t elements = std::max<int64_t>(1, elements_a_row);
  if (work == Work::reads && batch < (int64_t{1} << 21) / elements) return std::max<int64_t>(1, batch);
  return std::max<int64_t>(1, (int64_t{1} << 17) / elements);
}

// Run an operation over the batch with the interpreter's lock released. Large batches are cut into pieces, mostly of
// some milliseconds, between which Ctrl-C is answered.
template <class Batch>
nb::object run(const Batch& batch, void (*const Level::*operation)(const Batch&, int64_t, int64_t),
               Work work, int64_t elements_a_row, const Results& results, bool raises) {
  const Level& level = active_level();
  const int64_t piece = std::max<int64_t>(1, (int64_t{num_threads()} << 24) / std::max<int64_t>(1, elements_a_row));
  for (int64_t start = 0; start < batch.batch; start += piece) {
    if (start > 0 && PyErr_CheckSignals()) throw nb::python_error();
    const int64_t rows = std::min(piece, batch.batch - start);
    const nb::gil_scoped_release release;
    parallel_rows(rows, grain(work, rows, elements_a_row),
                  [&](int64_t first, int64_t last) { (level.*operation)(batch, start + first, start + last); });
  }
  const auto dead = [](int32_t status) { return (status & kDead) != 0; };
  return raises && std::any_of(batch.status, batch.status + batch.batch, dead) ? nb::none() : results.tuple();
}

nb::object sample_rows(SampleMode mode, H logits, H temperature, H top_k, H top_p, H min_p, H penalty, H history,
                       H mask, H seed, H offset, H draft_index, H check) {
  const IeeeScope ieee;
  Arguments given(logits);
  SampleBatch batch;
  batch.mode = mode;
  batch.logits = given.first_rows(logits, 2);
  batch.batch = given.batch();
  given.mask(mask, batch.logits, {batch.batch}, batch.logits.vocab);
  batch.filters = given.filters(temperature, top_k, top_p, min_p, penalty);
  batch.history = given.history(history);
  batch.seed = given.seeds(seed);
  batch.offset = given.offsets(offset, 0);
  batch.draft_index = given.draft_index(draft_index);
  const bool raises = given.raises(check);
  if (!given.plain) return nb::none();
  Results results(given);
  batch.tokens = results.int64({batch.batch});
  if (mode == SampleMode::logprobs) {
    batch.logprobs = results.float32({batch.batch});
    batch.raw_logprobs = results.float32({batch.batch});
    batch.kept = results.int64({batch.batch});
  }
  batch.status = results.status(batch.batch, raises && mode == SampleMode::token);
  const bool whole_row = mode == SampleMode::logprobs || (!top_p.is_none() && top_k.is_none());
  return run(batch, &Level::sample, whole_row ? Work::powers : Work::reads, batch.logits.vocab, results, raises);
}

nb::object sample(H logits, H temperature, H top_k, H top_p, H min_p, H penalty, H history, H mask, H seed, H offset,
                  H draft_index, H check) {
  return sample_rows(SampleMode::token, logits, temperature, top_k, top_p, min_p, penalty, history, mask, seed, offset,
                     draft_index, check);
}

nb::object sample_with_logprobs(H logits, H temperature, H top_k, H top_p, H min_p, H penalty, H history, H mask,
                                H seed, H offset, H draft_index, H check) {
  return sample_rows(SampleMode::logprobs, logits, temperature, top_k, top_p, min_p, penalty, history, mask, seed,
                     offset, draft_index, check);
}

nb::object sample_probs(H probs, H seed, H offset, H check) {
  Arguments given(probs);
  SampleProbsBatch batch;
  batch.probs = given.first_rows(probs, 2);
  batch.batch = given.batch();
  batch.seed = given.seeds(seed);
  batch.offset = given.offsets(offset, 0);
  const bool raises = given.raises(check);
  if (!given.plain) return nb::none();
  Results results(given);
  batch.tokens = results.int64({batch.batch});
  batch.status = results.status(batch.batch, raises);
  return run(batch, &Level::sample_probs, Work::reads, batch.probs.vocab, results, raises);
}

nb::object filter_logits(H logits, H temperature, H top_k, H top_p, H min_p, H penalty, H history, H mask, H check) {
  const IeeeScope ieee;
  Arguments given(logits);
  FilterBatch batch;
  batch.logits = given.first_rows(logits, 2);
  batch.batch = given.batch();
  given.mask(mask, batch.logits, {batch.batch}, batch.logits.vocab);
  batch.filters = given.filters(temperature, top_k, top_p, min_p, penalty);
  batch.history = given.history(history);
  const bool raises = given.raises(check);
  if (!given.plain) return nb::none();
  Results results(given);
  batch.filtered = results.float32({batch.batch, batch.logits.vocab});
  batch.status = results.status(batch.batch, raises);
  return run(batch, &Level::filter_logits, Work::powers, batch.logits.vocab, results, raises);
}

// What the three verifications share: the rows and the drafts first, the run last.
void begin(Arguments& given, VerifyBatch& batch, H target, H draft, H draft_tokens, H count, H eos) {
  batch.target = given.first_rows(target, 3);
  batch.batch = given.batch();
  batch.draft_tokens = given.drafts(draft_tokens);
  batch.drafted = batch.draft_tokens.columns;
  given.require(given.positions() == batch.drafted + 1);
  if (!draft.is_none()) batch.draft = given.more_rows(draft, batch.drafted);
  batch.num_draft_tokens = given.draft_lengths(count, batch.drafted);
  batch.eos = given.eos(eos);
}

nb::object finish(const Arguments& given, VerifyBatch& batch, bool raises) {
  if (!given.plain) return nb::none();
  Results results(given);
  batch.num_accepted = results.int64({batch.batch});
  batch.next_token = results.int64({batch.batch});
  batch.tokens = results.int64({batch.batch, batch.drafted + 1});
  batch.num_emitted = results.int64({batch.batch});
  batch.eos_hit = results.boolean({batch.batch});
  batch.status = results.int32({batch.batch});
  const bool reads = batch.from_probabilities || batch.rule == Rule::greedy || batch.rule == Rule::match;
  return run(batch, &Level::verify, reads ? Work::reads : Work::powers, batch.target.vocab * (batch.drafted + 1),
             results, raises);
}

nb::object verify(H target, H draft, H draft_tokens, H rule, H temperature, H top_k, H top_p, H min_p, H penalty,
                  H draft_temperature, H draft_top_k, H draft_top_p, H draft_min_p, H draft_penalty, H history, H mask,
                  H draft_mask, H count, H eos, H seed, H offset, H check) {
  const IeeeScope ieee;
  Arguments given(target);
  VerifyBatch batch;
  begin(given, batch, target, draft, draft_tokens, count, eos);
  batch.rule = given.rule(rule);
  const auto own = [](H drafts, H targets) { return drafts.is_none() ? targets : drafts; };
  batch.filters = given.filters(temperature, top_k, top_p, min_p, penalty);
  batch.draft_filters = given.filters(own(draft_temperature, temperature), own(draft_top_k, top_k),
                                      own(draft_top_p, top_p), own(draft_min_p, min_p), own(draft_penalty, penalty));
  batch.history = given.history(history);
  const int64_t vocab = batch.target.vocab, draft_vocab = draft.is_none() ? vocab : batch.draft.vocab;
  given.mask(mask, batch.target, {batch.batch, batch.drafted + 1}, vocab);
  if (draft_mask.is_none()) {
    given.mask(mask, batch.draft, {batch.batch, batch.drafted + 1}, vocab);
  } else {
    given.mask(draft_mask, batch.draft, {batch.batch, batch.drafted}, draft_vocab);
  }
  batch.seed = given.seeds(seed);
  batch.offset = given.offsets(offset, batch.drafted);
  return finish(given, batch, given.raises(check));
}

nb::object verify_probs(H target, H draft, H draft_tokens, H rule, H accept, H emit, H seed, H offset, H count, H eos,
                        H check) {
  const IeeeScope ieee;
  Arguments given(target);
  VerifyBatch batch;
  batch.from_probabilities = true;
  begin(given, batch, target, draft, draft_tokens, count, eos);
  batch.rule = given.rule(rule);
  batch.uniform_accept = given.uniforms(accept, batch.drafted);
  batch.uniform_sample = given.uniforms(emit, batch.drafted + 1);
  if (!seed.is_none()) batch.seed = given.seeds(seed);
  const bool tested = batch.drafted > 0 && (batch.rule == Rule::token || batch.rule == Rule::block);
  const bool uniforms = batch.uniform_sample && (batch.uniform_accept || !tested);
  given.require(!seed.is_none() || batch.rule == Rule::greedy || uniforms);
  batch.offset = given.offsets(offset, batch.drafted);
  return finish(given, batch, given.raises(check));
}

nb::object verify_greedy(H target, H draft_tokens, H count, H eos, H check) {
  Arguments given(target);
  VerifyBatch batch;
  batch.rule = Rule::greedy;
  begin(given, batch, target, nb::none(), draft_tokens, count, eos);
  batch.filters = batch.draft_filters = given.filters(nb::none(), nb::none(), nb::none(), nb::none(), nb::none());
  return finish(given, batch, given.raises(check));
}

// The largest logits of a row [V] by id, largest first: for drafts, so the arguments but the row are the package's own.
nb::object largest(H row, int64_t count, float distance) {
  const IeeeScope ieee;
  Arguments given(row);
  LargestQuery query;
  query.row = given.first_rows(row, 1);
  if (!given.plain) return nb::none();
  std::vector<int64_t> ids(count);
  std::vector<float> logits(count);
  query.count = count;
  query.distance = distance;
  query.ids = ids.data();
  query.logits = logits.data();
  const int64_t found = active_level().largest(query);
  nb::dict by_id;
  for (int64_t i = 0; i < found; ++i) by_id[nb::int_(ids[i])] = nb::float_(logits[i]);
  return by_id;
}

// Define an entry, each of whose arguments may be None.
template <class... Handles>
void entry(nb::module_& m, const char* name, nb::object (*function)(Handles...)) {
  m.def(name, function, (static_cast<void>(sizeof(Handles)), nb::arg().none())...);
}

}  // namespace

NB_MODULE(_core, m) {
  if (available_levels().empty()) throw nb::import_error("this processor is below every level the core was built for");
  m.doc() = "The C++ core. draftproof._native calls it.";
  entry(m, "sample", &sample);
  entry(m, "sample_with_logprobs", &sample_with_logprobs);
  entry(m, "sample_probs", &sample_probs);
  entry(m, "filter_logits", &filter_logits);
  entry(m, "verify", &verify);
  entry(m, "verify_probs", &verify_probs);
  entry(m, "verify_greedy", &verify_greedy);
  m.def("largest", &largest, nb::arg(), nb::arg(), nb::arg());
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
