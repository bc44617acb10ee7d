#include "page/gain8.h"

namespace crumb {

float gain8_value(uint8_t code) { return gain8_value_of(code); }

Gain8 to_gain8(float gain) { return gain8_of(gain); }

}  // namespace crumb
