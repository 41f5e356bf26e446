package servers

import "strings"

// slotCount is the number of hash slots of a Redis Cluster.
const slotCount = 16384

// Slot returns the hash slot of a key: of the part between the first { and the
// next }, if there is something between them, else of the whole key.
func (c *Cluster) Slot(key string) int {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(rest, "}"); ok && tag != "" {
			key = tag
		}
	}
	return int(crc16(key)) % slotCount
}

// crc16 is CRC-16/XMODEM.
func crc16(s string) (sum uint16) {
	for i := range len(s) {
		sum ^= uint16(s[i]) << 8
		for range 8 {
			carry := sum&0x8000 != 0
			sum <<= 1
			if carry {
				sum ^= 0x1021
			}
		}
	}
	return sum
}

// A slotRange is the slots from first to last.
type slotRange struct{ first, last int }

// share returns the i-th of n equal parts of all slots.
func share(i, n int) slotRange {
	return slotRange{first: i * slotCount / n, last: (i+1)*slotCount/n - 1}
}
