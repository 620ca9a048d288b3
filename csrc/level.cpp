// Compiled once per instruction-set level: DRAFTPROOF_LEVEL names the namespace.
#include "scan.cpp"
#include "race.cpp"
#include "top_k.cpp"
#include "top_p.cpp"
#include "sampling.cpp"
#include "verification.cpp"

#define DRAFTPROOF_STRING_(x) #x
#define DRAFTPROOF_STRING(x) DRAFTPROOF_STRING_(x)

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

extern const Level level;
const Level level = {DRAFTPROOF_STRING(DRAFTPROOF_LEVEL), sample, sample_probs, filter_logits, verify, largest, read};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
