// What all emulated kernels have in common, compiled once.
#define EMULATED_ONCE
#include "emulated.h"
