// The instruction-set levels that this build holds and this machine runs.
#pragma once

#include <string>
#include <vector>

#include "operations.h"

namespace draftproof {

std::vector<const Level*> available_levels();  // best first
const Level& active_level();
bool set_level(const std::string& name);  // false if it is not available

}  // namespace draftproof
