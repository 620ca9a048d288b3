// The entry of one target: DRAFTPROOF_OPERATION names what it runs.
#include "bytes.h"

namespace fuzz {
void DRAFTPROOF_OPERATION(Bytes& bytes);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  fuzz::DRAFTPROOF_OPERATION(bytes);
  return 0;
}
