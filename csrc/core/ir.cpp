#include "core/ir.h"
