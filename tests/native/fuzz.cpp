// The operations of the core on inputs as odd as their callers may pass, at every level, on one thread and on three, in
// several layouts: all results must be those of plain.h, bit for bit.
#include "compare.h"

namespace fuzz {
namespace {

constexpr float kNoNumber = std::numeric_limits<float>::quiet_NaN();

// --- sampling ---------------------------------------------------------------------------------------------------------

struct SamplingInput {
  int64_t batch;
  RowsInput rows;
  FiltersInput filters;
  IdTable history;
  StreamsInput streams;
  PerRow<int64_t> draft_index;
  std::vector<plain::Law> laws;
};

// A top_p on the edge of the mass that is ranked above some token, often the one that wins without top_p, or next to it.
float aimed_top_p(Bytes& bytes, const SamplingInput& in) {
  plain::Filters filters = in.filters.at(0);
  filters.top_p = 1.0f;
  filters.min_p = 0.0f;
  const plain::Law law = plain::law_of(in.rows.row(0, 0), filters, in.history.row(0), in.rows.mask(0, 0));
  if (law.status) return 0.5f;
  int64_t rank = bytes.below(static_cast<int64_t>(law.kept.size()));
  if (bytes.chance(128)) {
    const int64_t winner = plain::race(law, in.streams.at(0), in.draft_index[0]);
    rank = std::find(law.kept.begin(), law.kept.end(), winner) - law.kept.begin();
  }
  double above = 0.0;
  for (int64_t i = 0; i < rank; ++i) above += static_cast<double>(law.masses[law.kept[i]]);
  const float p = static_cast<float>(above / static_cast<double>(law.total) + bytes.pick({0.0, 0x1p-21, 0x1p-22}));
  return std::min(1.0f, bytes.chance(128) ? p : std::nextafter(p, bytes.chance(128) ? 0.0f : 1.0f));
}

SamplingInput any_sampling(Bytes& bytes) {
  SamplingInput in;
  in.batch = bytes.below(5);
  const int64_t vocab = vocabulary(bytes, in.batch);
  const Shape shape = {in.batch, 1, vocab};
  in.rows = any_rows(bytes, shape, false);
  if (bytes.chance(96)) add_mask(bytes, in.rows, vocab);
  in.filters = any_filters(bytes, in.batch, vocab);
  in.history = ids(bytes, in.batch, bytes.below(9), vocab);
  aim_at_maxima(bytes, in.history, in.rows);
  in.streams = any_streams(bytes, in.batch, 0);
  in.draft_index = per_row<int64_t>(bytes, in.batch, [&] { return bytes.pick<int64_t>({-1, -1, 0, 1, (1 << 24) - 1}); });
  if (in.batch > 0 && bytes.chance(64)) {
    in.filters.top_p = per_row<float>(bytes, in.batch, [&] { return aimed_top_p(bytes, in); });
  }
  for (int64_t i = 0; i < in.batch; ++i)
    in.laws.push_back(plain::law_of(in.rows.row(i, 0), in.filters.at(i), in.history.row(i), in.rows.mask(i, 0)));
  describe = [in](int64_t i) {
    print("logits", in.rows, i, 0);
    print("filters", in.filters.at(i));
    print("history", in.history.row(i));
  };
  return in;
}

template <class Batch>
Batch batch_of(const SamplingInput& in, Form form) {
  Batch batch;
  batch.batch = in.batch;
  batch.logits = in.rows.rows(form);
  batch.filters = in.filters.filters();
  batch.history = in.history.matrix();
  return batch;
}

int64_t kept_of(const plain::Law& law) {
  return std::count_if(law.kept.begin(), law.kept.end(), [&](int64_t id) { return law.divided[id] > -kInfinity; });
}

void sample_in(Bytes& bytes, SampleMode mode) {
  const SamplingInput in = any_sampling(bytes);
  const auto& streams = in.streams;
  const auto& draft_index = in.draft_index;
  describe = [&, before = describe](int64_t i) {
    before(i);
    print("seed, offset, draft_index", std::vector<int64_t>{streams.seed[i], streams.offset[i], draft_index[i]});
  };
  std::vector<int64_t> tokens(in.batch, -1);
  std::vector<float> logprobs(in.batch, kNoNumber), raw(in.batch, kNoNumber);
  for (int64_t i = 0; i < in.batch; ++i) {
    const plain::Law& law = in.laws[i];
    if (law.status) continue;
    tokens[i] = plain::race(law, streams.at(i), draft_index[i]);
    if (mode == SampleMode::token) continue;
    logprobs[i] = law.greedy ? 0.0f : plain::log_probability(law.t[tokens[i]], law.total);
    raw[i] = plain::raw_log_probability(in.rows.row(i, 0), tokens[i]);
  }
  each_way([&](const Way& way) {
    auto batch = batch_of<SampleBatch>(in, way.form);
    const auto drawn = results<int64_t>(in.batch), kept = results<int64_t>(in.batch);
    const auto said = results<float>(in.batch), said_raw = results<float>(in.batch);
    const auto status = results<int32_t>(in.batch);
    batch.mode = mode;
    batch.seed = streams.seed.column();
    batch.offset = streams.offset.column();
    batch.draft_index = draft_index.column();
    batch.tokens = drawn.get();
    batch.status = status.get();
    if (mode == SampleMode::logprobs) {
      batch.logprobs = said.get();
      batch.raw_logprobs = said_raw.get();
      batch.kept = kept.get();
    }
    run(way, batch, way.level.sample);
    for (int64_t i = 0; i < in.batch; ++i) {
      expect(way, "status", i, status[i], in.laws[i].status);
      expect(way, "token", i, drawn[i], tokens[i]);
      if (mode == SampleMode::token) continue;
      expect(way, "logprob", i, 0, said[i], logprobs[i]);
      expect(way, "raw_logprob", i, 0, said_raw[i], raw[i]);
      expect(way, "kept", i, kept[i], kept_of(in.laws[i]));
    }
  });
}

}  // namespace

void sample(Bytes& bytes) { sample_in(bytes, SampleMode::token); }
void sample_with_logprobs(Bytes& bytes) { sample_in(bytes, SampleMode::logprobs); }

void largest(Bytes& bytes) {
  const int64_t vocab = vocabulary(bytes, 1), count = 1 + bytes.below(2 * vocab);
  const RowsInput rows = any_rows(bytes, {1, 1, vocab}, false);
  const float distance = bytes.pick({0.0f, 0.5f, 40.0f, 0x1p127f});
  describe = [&](int64_t) { print("logits", rows, 0, 0); };
  const std::vector<float> row = rows.row(0, 0);
  const bool nan = std::any_of(row.begin(), row.end(), [](float x) { return std::isnan(x); });
  const float maximum = *std::max_element(row.begin(), row.end());
  std::vector<int64_t> expected;
  for (int64_t id = 0; id < vocab; ++id)
    if (!nan && row[id] > -kInfinity && row[id] >= maximum - distance) expected.push_back(id);
  std::sort(expected.begin(), expected.end(),
            [&](int64_t a, int64_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
  expected.resize(std::min<size_t>(expected.size(), count));
  each_way([&](const Way& way) {
    const auto ids = results<int64_t>(count);
    const auto logits = results<float>(count);
    const int64_t found = way.level.largest({rows.rows(way.form), count, distance, ids.get(), logits.get()});
    expect(way, "number", 0, found, static_cast<int64_t>(expected.size()));
    for (int64_t i = 0; i < found; ++i) {
      expect(way, "token", i, ids[i], expected[i]);
      expect(way, "logit", i, 0, logits[i], row[expected[i]]);
    }
  });
}

void filter_logits(Bytes& bytes) {
  const SamplingInput in = any_sampling(bytes);
  const int64_t vocab = in.rows.shape[2];
  each_way([&](const Way& way) {
    auto batch = batch_of<FilterBatch>(in, way.form);
    const auto filtered = results<float>(in.batch * vocab);
    const auto status = results<int32_t>(in.batch);
    batch.filtered = filtered.get();
    batch.status = status.get();
    run(way, batch, way.level.filter_logits);
    for (int64_t i = 0; i < in.batch; ++i) {
      const plain::Law& law = in.laws[i];
      std::vector<float> expected(vocab, law.status ? kNoNumber : -kInfinity);
      for (const int64_t id : law.kept) expected[id] = law.divided[id];
      expect(way, "status", i, status[i], law.status);
      for (int64_t id = 0; id < vocab; ++id) expect(way, "logit", i, id, filtered[i * vocab + id], expected[id]);
    }
  });
}

void sample_probs(Bytes& bytes) {
  const int64_t batch_size = bytes.below(5);
  const RowsInput rows = any_rows(bytes, {batch_size, 1, vocabulary(bytes, batch_size)}, true);
  const StreamsInput streams = any_streams(bytes, batch_size, 0);
  std::vector<plain::Law> laws;
  std::vector<int64_t> tokens(batch_size, -1);
  for (int64_t i = 0; i < batch_size; ++i) {
    laws.push_back(plain::law_of_probabilities(rows.row(i, 0)));
    if (!laws[i].status) tokens[i] = plain::inverse_cdf(laws[i].masses, streams.at(i).fraction(0));
  }
  each_way([&](const Way& way) {
    SampleProbsBatch batch;
    const auto drawn = results<int64_t>(batch_size);
    const auto status = results<int32_t>(batch_size);
    batch.batch = batch_size;
    batch.probs = rows.rows(way.form);
    batch.seed = streams.seed.column();
    batch.offset = streams.offset.column();
    batch.tokens = drawn.get();
    batch.status = status.get();
    run(way, batch, way.level.sample_probs);
    for (int64_t i = 0; i < batch_size; ++i) {
      expect(way, "status", i, status[i], laws[i].status);
      expect(way, "token", i, drawn[i], tokens[i]);
    }
  });
}

// --- verification -----------------------------------------------------------------------------------------------------

namespace {

struct RoundInput {
  int64_t batch = 0, drafted = 0;
  Rule rule = Rule::token;
  bool from_probabilities = false, point_mass = false, streams_given = true;
  RowsInput target, draft;
  FiltersInput filters, draft_filters;
  IdTable history, tokens, eos;
  PerRow<int64_t> count;
  StreamsInput streams;
  std::vector<float> accept, emit;  // empty: from the streams

  int64_t vocab() const { return point_mass ? target.shape[2] : std::max(target.shape[2], draft.shape[2]); }
  plain::Law law(const RowsInput& rows, const FiltersInput& f, int64_t i, int64_t position) const {
    if (from_probabilities) return plain::law_of_probabilities(rows.row(i, position));
    auto seen = history.row(i);
    const auto drafts = tokens.row(i);
    seen.insert(seen.end(), drafts.begin(), drafts.begin() + position);
    auto parameters = rule == Rule::greedy ? plain::Filters{} : f.at(i);
    parameters.penalty = f.penalty[i];
    return plain::law_of(rows.row(i, position), parameters, seen, rows.mask(i, position));
  }
};

struct Draws {
  const RoundInput& in;
  int64_t i;

  float accept(int64_t index) const {
    if (!in.accept.empty()) return in.accept[i * in.drafted + index];
    return plain::uniform(in.streams.at(i).word(4, static_cast<uint32_t>(index), 0, 0));
  }
  uint64_t emit(int64_t index) const {
    if (!in.emit.empty()) return injected(index);
    return in.streams.at(i).fraction(static_cast<uint32_t>(index));
  }
  int64_t follow(int64_t position, const plain::Law& law) const {
    if (!in.from_probabilities) return plain::race(law, in.streams.at(i, position), -1);
    return plain::inverse_cdf(law.masses, in.emit.empty() ? in.streams.at(i, position).fraction(0) : injected(position));
  }
  uint64_t injected(int64_t index) const {
    return static_cast<uint64_t>(in.emit[i * (in.drafted + 1) + index] * 0x1p62f);
  }
};

// Often what the target or the draft would say.
void any_drafts(Bytes& bytes, RoundInput& in) {
  in.tokens = ids(bytes, in.batch, in.drafted, in.vocab());
  const int64_t likely = bytes.pick<int64_t>({0, 128, 256});
  for (int64_t k = 0; k < in.batch * in.drafted; ++k) {
    if (static_cast<int64_t>(bytes.take(1)) >= likely) continue;
    const int64_t i = k / in.drafted, position = k % in.drafted;
    const plain::Law law = bytes.chance(128) || in.point_mass ? in.law(in.target, in.filters, i, position)
                                                             : in.law(in.draft, in.draft_filters, i, position);
    if (law.status) continue;
    in.tokens.ids[k] = in.rule == Rule::greedy          ? plain::argmax(law)
                       : in.rule == Rule::match         ? Draws{in, i}.follow(position, law)
                                                        : plain::inverse_cdf(law.masses, bytes.take(7) << 6);
  }
  in.tokens.laid = lay(bytes, in.tokens.ids, {in.batch, in.drafted, 1});
}

RoundInput any_round(Bytes& bytes, bool probabilities) {
  RoundInput in;
  in.batch = bytes.below(4);
  in.drafted = bytes.below(5);
  in.rule = bytes.pick({Rule::token, Rule::block, Rule::match, Rule::greedy});
  in.from_probabilities = probabilities;
  const int64_t vocab = vocabulary(bytes, in.batch * (2 * in.drafted + 1));
  in.target = any_rows(bytes, {in.batch, in.drafted + 1, vocab}, probabilities);
  in.filters = any_filters(bytes, in.batch, vocab);
  const int64_t kind = bytes.below(4);
  in.point_mass = kind == 0;
  if (kind > 0) {
    const int64_t draft_vocab = bytes.chance(64) ? vocabulary(bytes, in.batch * (2 * in.drafted + 1)) : vocab;
    in.draft = any_rows(bytes, {in.batch, in.drafted, draft_vocab}, probabilities);
    if (kind == 1 && draft_vocab == vocab) {  // the same laws, which leave no residual, or nearly so
      for (int64_t i = 0; i < in.batch; ++i)
        for (int64_t j = 0; j < in.drafted; ++j)
          std::copy_n(in.target.values.begin() + (i * (in.drafted + 1) + j) * vocab, vocab,
                      in.draft.values.begin() + (i * in.drafted + j) * vocab);
      const float apart = bytes.pick({0.0f, 0.0f, 1e-6f, 1e-3f, 0.1f, 1.0f});
      Random random(bytes.take(4));
      for (float& x : in.draft.values) x *= 1.0f + apart * static_cast<float>(random.unit());
      in.draft.dtype = DType::f32;
      in.draft.laid = in.draft.tight = in.draft.floats = contiguous(in.draft.values, in.draft.shape);
    }
    in.draft_filters = kind < 3 ? in.filters : any_filters(bytes, in.batch, draft_vocab);
    if (!probabilities && bytes.chance(96)) add_mask(bytes, in.draft, bytes.chance(128) ? draft_vocab : vocab);
  }
  if (!probabilities && bytes.chance(96)) add_mask(bytes, in.target, vocab);
  in.history = ids(bytes, in.batch, bytes.below(5), vocab);
  aim_at_maxima(bytes, in.history, in.target);
  in.streams = any_streams(bytes, in.batch, in.drafted);
  in.eos = ids(bytes, in.batch, bytes.below(3), vocab);
  in.count = per_row<int64_t>(bytes, in.batch, [&] { return bytes.chance(192) ? in.drafted : bytes.below(in.drafted + 1); });
  return in;
}

// Uniforms at their ends, at quotients of probabilities, and on the edges of the target's laws.
void inject_uniforms(Bytes& bytes, RoundInput& in) {
  const int64_t given = bytes.below(4);
  constexpr float kLast = 1.0f - 0x1p-24f;
  for (int64_t k = 0; (given & 1) && k < in.batch * in.drafted; ++k) {
    float u = bytes.chance(128) ? unit(bytes) : bytes.pick({0.0f, 1e-45f, 0x1p-24f, 0.5f, kLast});
    if (bytes.chance(64)) {
      const float p = in.target.values[bytes.below(in.target.shape[2])];
      const float q = in.draft.values.empty() ? 1.0f : in.draft.values[bytes.below(in.draft.shape[2])];
      u = p / q >= 0.0f && p / q <= kLast ? p / q : kLast;
    }
    in.accept.push_back(u);
  }
  for (int64_t k = 0; (given & 2) && k < in.batch * (in.drafted + 1); ++k) {
    float u = bytes.chance(128) ? unit(bytes) : bytes.pick({0.0f, 1e-45f, 0x1p-24f, 0.5f, kLast});
    const plain::Law law = in.law(in.target, in.filters, k / (in.drafted + 1), k % (in.drafted + 1));
    if (!law.status && bytes.chance(96)) {
      double prefix = 0.0;
      for (int64_t id = 0, end = bytes.below(in.target.shape[2]); id < end; ++id) prefix += static_cast<double>(law.masses[id]);
      u = std::min(static_cast<float>(prefix / static_cast<double>(law.total)), kLast);
    }
    in.emit.push_back(u);
  }
}

void check_round(const RoundInput& in) {
  std::vector<plain::Verified> expected;
  for (int64_t i = 0; i < in.batch; ++i) {
    const auto drafts = plain::draft_of(in.tokens.row(i), in.count[i], in.eos.row(i), in.vocab());
    auto eos = in.eos.row(i);
    std::erase_if(eos, [](int64_t id) { return id < 0; });
    expected.push_back(plain::verify(
        static_cast<plain::Rule>(in.rule), drafts, eos, [&](int64_t k) { return in.law(in.target, in.filters, i, k); },
        [&](int64_t k) { return in.law(in.draft, in.draft_filters, i, k); }, in.point_mass, Draws{in, i}));
  }
  // What lies beyond 2^-24 of 1 comes from no caller.
  const std::unique_ptr<float[]> accept(in.accept.empty() ? nullptr : new float[in.accept.size()]);
  const std::unique_ptr<float[]> emit(in.emit.empty() ? nullptr : new float[in.emit.size()]);
  std::copy(in.accept.begin(), in.accept.end(), accept.get());
  std::copy(in.emit.begin(), in.emit.end(), emit.get());
  const int64_t width = in.drafted + 1;
  each_way([&](const Way& way) {
    VerifyBatch batch;
    batch.batch = in.batch;
    batch.drafted = in.drafted;
    batch.rule = in.rule;
    batch.from_probabilities = in.from_probabilities;
    batch.target = in.target.rows(way.form);
    if (!in.point_mass) batch.draft = in.draft.rows(way.form);
    batch.filters = in.filters.filters();
    if (!in.point_mass) batch.draft_filters = in.draft_filters.filters();
    batch.history = in.history.matrix();
    batch.draft_tokens = in.tokens.matrix();
    batch.num_draft_tokens = in.count.column();
    batch.eos = in.eos.matrix();
    batch.seed = in.streams.seed.column();
    batch.offset = in.streams.offset.column();
    batch.uniform_accept = accept.get();
    batch.uniform_sample = emit.get();
    const auto accepted = results<int64_t>(in.batch), next = results<int64_t>(in.batch);
    const auto tokens = results<int64_t>(in.batch * width), emitted = results<int64_t>(in.batch);
    const auto eos_hit = results<bool>(in.batch);
    const auto status = results<int32_t>(in.batch);
    batch.num_accepted = accepted.get();
    batch.next_token = next.get();
    batch.tokens = tokens.get();
    batch.num_emitted = emitted.get();
    batch.eos_hit = eos_hit.get();
    batch.status = status.get();
    run(way, batch, way.level.verify);
    for (int64_t i = 0; i < in.batch; ++i) {
      const plain::Verified& v = expected[i];
      expect(way, "status", i, status[i], v.status);
      expect(way, "num_accepted", i, accepted[i], v.accepted);
      expect(way, "next_token", i, next[i], v.next);
      expect(way, "num_emitted", i, emitted[i], v.emitted);
      expect(way, "eos_hit", i, eos_hit[i], v.eos_hit);
      for (int64_t k = 0; k < width; ++k) {
        const int64_t token = k < v.accepted ? in.tokens.ids[i * in.drafted + k] : k < v.emitted ? v.next : -1;
        expect<int64_t>(way, "token", i, k, tokens[i * width + k], token);
      }
    }
  });
}

}  // namespace

void verify(Bytes& bytes) {
  RoundInput in = any_round(bytes, false);
  any_drafts(bytes, in);
  check_round(in);
}

void verify_probs(Bytes& bytes) {
  RoundInput in = any_round(bytes, true);
  inject_uniforms(bytes, in);
  any_drafts(bytes, in);
  check_round(in);
}

void verify_greedy(Bytes& bytes) {
  RoundInput in;
  in.batch = bytes.below(4);
  in.drafted = bytes.below(5);
  in.rule = Rule::greedy;
  in.point_mass = true;
  const int64_t vocab = vocabulary(bytes, in.batch * (2 * in.drafted + 1));
  in.target = any_rows(bytes, {in.batch, in.drafted + 1, vocab}, false);
  Bytes none(nullptr, 0);
  in.filters = any_filters(none, in.batch, vocab);
  in.history = ids(bytes, in.batch, 0, vocab);
  in.eos = ids(bytes, in.batch, bytes.below(3), vocab);
  in.count = per_row<int64_t>(bytes, in.batch, [&] { return bytes.below(in.drafted + 1); });
  in.streams = any_streams(none, in.batch, in.drafted);
  any_drafts(bytes, in);
  check_round(in);
}

}  // namespace fuzz
