#pragma once

#include "operations.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

void verify(const VerifyBatch& batch, int64_t first, int64_t last);

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
