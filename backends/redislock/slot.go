package redislock

// slots is the number of slots of a Redis Cluster.
const slots = 16384

// crcTable is of CRC-16/XMODEM, by which a Redis Cluster assigns keys to slots.
var crcTable = func() (table [256]uint16) {
	for i := range table {
		crc := uint16(i) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
		table[i] = crc
	}
	return table
}()

// slot is the slot of keys with this text between their braces.
func slot(tag string) int {
	var crc uint16
	for i := range len(tag) {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^tag[i]]
	}
	return int(crc % slots)
}
