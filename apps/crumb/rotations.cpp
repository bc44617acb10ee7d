#include "commands.h"
namespace crumb::app { int rotations(int, char**) { return 1; } }
